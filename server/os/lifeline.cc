#include "server/os/lifeline.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <utility>

#include "proto/types/status_macros.h"

namespace optstate::os {

absl::StatusOr<std::unique_ptr<Lifeline>> Lifeline::Watch(
    EventLoop* loop, UniqueFd pipe, std::function<void()> on_end) {
  std::unique_ptr<Lifeline> lifeline(
      new Lifeline(loop, std::move(pipe), std::move(on_end)));
  OPTSTATE_RETURN_IF_ERROR(
      loop->Watch(lifeline->pipe_.get(), EPOLLIN,
                  [raw = lifeline.get()](uint32_t) { raw->OnReadable(); }));
  return lifeline;
}

Lifeline::Lifeline(EventLoop* loop, UniqueFd pipe, std::function<void()> on_end)
    : loop_(loop), pipe_(std::move(pipe)), on_end_(std::move(on_end)) {}

Lifeline::~Lifeline() { loop_->Unwatch(pipe_.get()); }

void Lifeline::OnReadable() {
  char ignored[64];
  if (::read(pipe_.get(), ignored, sizeof(ignored)) > 0) return;
  loop_->Unwatch(pipe_.get());
  on_end_();
}

}  // namespace optstate::os
