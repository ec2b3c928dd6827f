#ifndef OPTSTATE_SERVER_OS_SIGNALS_H_
#define OPTSTATE_SERVER_OS_SIGNALS_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"
#include "server/os/event_loop.h"

namespace optstate::os {

// Blocks SIGTERM, SIGINT and SIGHUP in this thread and those that it starts,
// and ignores SIGPIPE. Must be called before any thread is started: otherwise a
// signal could still end the process through a thread that does not block it.
void BlockSignals();

// Turns the blocked signals into calls from the loop.
class SignalWatch {
 public:
  static absl::StatusOr<std::unique_ptr<SignalWatch>> Start(
      EventLoop* loop, std::function<void(int signal)> on_signal);
  ~SignalWatch();

 private:
  SignalWatch(EventLoop* loop, UniqueFd fd);

  EventLoop* const loop_;
  const UniqueFd fd_;
};

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_SIGNALS_H_
