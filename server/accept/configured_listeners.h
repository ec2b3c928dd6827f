#ifndef OPTSTATE_SERVER_ACCEPT_CONFIGURED_LISTENERS_H_
#define OPTSTATE_SERVER_ACCEPT_CONFIGURED_LISTENERS_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/engine.pb.h"
#include "server/accept/activated_sockets.h"
#include "server/accept/listener.h"

namespace optstate::accept {

// The listeners that a configuration names, at the start and at an upgrade.

// Listeners in the order of AddressesOf().
using Listeners = std::vector<std::unique_ptr<Listener>>;
using ListenersByAddress = std::map<std::string, std::unique_ptr<Listener>>;

// Returns the configured addresses: the socket first, then `listen`.
std::vector<std::string> AddressesOf(const v1::DaemonConfig& config);

// Opens the configured listeners. Those that `handover` (null: there was no
// previous build) brings along are inherited, or retired when they are no
// longer configured. Those that the service manager has opened are adopted: see
// AdoptActivatedSockets().
absl::StatusOr<Listeners> OpenListeners(
    const v1::DaemonConfig& config, const v1::SupervisorHandover* handover,
    const std::vector<ActivatedSocket>& activated = {});

// Opens the listeners that `next` needs and that `listeners`, which `own`
// configured, lack: new addresses, and unix sockets that clients cannot reach
// any more, because their files were removed.
absl::StatusOr<ListenersByAddress> OpenMissing(const v1::DaemonConfig& own,
                                               const Listeners& listeners,
                                               const v1::DaemonConfig& next);

// Adds to `handover` the listeners of this build, and `missing` beside them or
// in the place of those with the same address.
void HandOverListeners(const v1::DaemonConfig& own, const Listeners& listeners,
                       const ListenersByAddress& missing,
                       v1::SupervisorHandover* handover);

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_CONFIGURED_LISTENERS_H_
