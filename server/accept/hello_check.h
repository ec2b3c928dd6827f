#ifndef OPTSTATE_SERVER_ACCEPT_HELLO_CHECK_H_
#define OPTSTATE_SERVER_ACCEPT_HELLO_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/session.pb.h"
#include "server/accept/peer_credentials.h"

namespace optstate::accept {

// Range of session protocols that this daemon speaks.
inline constexpr uint32_t kProtocolVersionMin = 3;

// Checks the content of a Hello, independent of the daemon's state. Returns the
// protocol version that both sides speak. FAILED_PRECONDITION naming both
// ranges when there is none; INVALID_ARGUMENT: job name, wire.
absl::StatusOr<uint32_t> CheckHello(const v1::Hello& hello,
                                    const PeerCredentials& peer);

// Returns INVALID_ARGUMENT unless `name` is [A-Za-z0-9][A-Za-z0-9._-]{0,127}:
// it is also a directory's name.
absl::Status CheckJobName(absl::string_view name);

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_HELLO_CHECK_H_
