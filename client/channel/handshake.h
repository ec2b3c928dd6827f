#ifndef OPTSTATE_CLIENT_CHANNEL_HANDSHAKE_H_
#define OPTSTATE_CLIENT_CHANNEL_HANDSHAKE_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/channel/channel.h"
#include "client/endpoint/endpoint.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// Starts a connection of any wire: dials, sends Hello and reads HelloReply. An
// error that the daemon answers is passed on; a daemon that cannot be reached
// is an UnreachableError, one that hangs up a TransportError. CANCELLED:
// interrupted; UNIMPLEMENTED: `two_phase` was asked of a daemon that does not
// know it. `access`: of a job that this connection makes.
absl::StatusOr<UniqueFd> OpenConnection(
    const Endpoint& endpoint, v1::Wire wire, const std::string& job,
    bool must_exist, bool two_phase, absl::Time deadline,
    const InterruptCheck& interrupted,
    const std::optional<AccessOptions>& access = std::nullopt);

// Makes the request. `comes_back`: the job must be as it was before.
v1::RegisterRequest MakeRegister(const ChannelSetup& setup, bool comes_back);
v1::AttachRequest MakeAttach(const ChannelSetup& setup);
// Fills the request, whose memory is used again.
void FillCommit(const ChannelSetup& setup, const CommitOptions& options,
                v1::CommitRequest* commit);
v1::DecideRequest MakeDecision(const StepVerdict& verdict);
// Makes a request for a connection that attaches no rank.
v1::DetachRequest MakeFarewell(const ChannelSetup& setup);

// UNIMPLEMENTED: the session fetches parameters, and the daemon does not know
// such sessions: its reply is one to a session of another kind.
absl::Status CheckFetches(const ChannelSetup& setup,
                          const v1::AttachReply& attached);

// Converts the replies after checking that they fit `setup`.
absl::StatusOr<Attached> MakeAttached(const ChannelSetup& setup,
                                      const v1::RegisterReply& registered,
                                      const v1::AttachReply& attached);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_HANDSHAKE_H_
