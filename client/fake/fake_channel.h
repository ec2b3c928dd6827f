#ifndef OPTSTATE_CLIENT_FAKE_FAKE_CHANNEL_H_
#define OPTSTATE_CLIENT_FAKE_FAKE_CHANNEL_H_

#include <memory>

#include "client/channel/channel.h"
#include "client/fake/fake_daemon.h"

namespace optstate::client {

// Makes a channel to `daemon`, which outlives the channel.
std::unique_ptr<Channel> MakeFakeChannel(FakeDaemon* daemon,
                                         ChannelSetup setup);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_FAKE_FAKE_CHANNEL_H_
