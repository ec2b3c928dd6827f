#ifndef OPTSTATE_CLIENT_FAKE_FAILING_CHANNEL_H_
#define OPTSTATE_CLIENT_FAKE_FAILING_CHANNEL_H_

#include <memory>

#include "client/channel/channel.h"

namespace optstate::client {

// How many of a channel's next calls fail; changed by the thread that uses the
// channel alone.
struct ChannelFaults {
  // The daemon refuses these pushes: INVALID_ARGUMENT.
  int refused_pushes = 0;
  // These aborts do not reach the daemon, which keeps what is staged:
  // DEADLINE_EXCEEDED.
  int lost_aborts = 0;
};

// Makes a channel over another one; `faults` outlives it. Only what the fake
// channel has is passed on.
std::unique_ptr<Channel> MakeFailingChannel(std::unique_ptr<Channel> channel,
                                            ChannelFaults* faults);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_FAKE_FAILING_CHANNEL_H_
