#ifndef OPTSTATE_SERVER_OS_LIFELINE_H_
#define OPTSTATE_SERVER_OS_LIFELINE_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"
#include "server/os/event_loop.h"

namespace optstate::os {

// The read end of a pipe whose other end a parent holds: its end is the end of
// the parent.
//
// Threads: the loop's. The loop outlives the object.
class Lifeline {
 public:
  // `on_end` runs once, when no process holds the pipe's other end any more;
  // bytes in the pipe mean nothing. `on_end` may not destroy the object.
  static absl::StatusOr<std::unique_ptr<Lifeline>> Watch(
      EventLoop* loop, UniqueFd pipe, std::function<void()> on_end);
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

 private:
  Lifeline(EventLoop* loop, UniqueFd pipe, std::function<void()> on_end);
  void OnReadable();

  EventLoop* const loop_;
  const UniqueFd pipe_;
  const std::function<void()> on_end_;
};

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_LIFELINE_H_
