#ifndef OPTSTATE_CLIENT_CHANNEL_CONNECT_H_
#define OPTSTATE_CLIENT_CHANNEL_CONNECT_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/channel/channel.h"
#include "client/endpoint/endpoint.h"

namespace optstate::client {

// Resolves the endpoint as ResolveEndpoint does. For "embedded", returns the
// unix endpoint of this process's own daemon, which is started if it does not
// run. `daemon_path`: see SessionOptions.
absl::StatusOr<Endpoint> FindDaemon(const std::string& endpoint,
                                    AwayDaemon away,
                                    const std::string& daemon_path,
                                    absl::Duration start_timeout);

// Makes a channel for the wire of an endpoint that is not embedded; the channel
// is not connected yet.
absl::StatusOr<std::unique_ptr<Channel>> MakeChannel(const Endpoint& endpoint,
                                                     ChannelSetup setup);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_CONNECT_H_
