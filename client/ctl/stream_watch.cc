#include "client/ctl/stream_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>

namespace optstate::ctl {

StreamWatch::StreamWatch(grpc::ClientContext* context,
                         absl::Duration silence_max, int interrupt)
    : context_(context),
      silence_max_(silence_max),
      interrupt_(interrupt),
      end_(::eventfd(0, EFD_CLOEXEC)),
      heard_ns_(absl::ToUnixNanos(absl::Now())),
      thread_([this] { Run(); }) {}

StreamWatch::~StreamWatch() {
  const uint64_t one = 1;
  const ssize_t ignored [[maybe_unused]] =
      ::write(end_.get(), &one, sizeof(one));
  thread_.join();
}

void StreamWatch::Run() {
  while (true) {
    const absl::Duration left =
        absl::FromUnixNanos(heard_ns_) + silence_max_ - absl::Now();
    if (left <= absl::ZeroDuration()) {
      was_silent_ = true;
      context_->TryCancel();
      return;
    }
    std::array<pollfd, 2> fds = {
        {{.fd = end_.get(), .events = POLLIN, .revents = 0},
         {.fd = interrupt_, .events = POLLIN, .revents = 0}}};
    // Without the fd of the end, which the process had no room for, the end is
    // not seen: then the call is not watched.
    if (!end_.ok()) return;
    const auto wait_ms = std::min<int64_t>(
        absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))),
        60'000);
    ::poll(fds.data(), fds.size(), static_cast<int>(wait_ms));
    if (fds[0].revents != 0) return;
    if (fds[1].revents != 0) {
      was_interrupted_ = true;
      context_->TryCancel();
      return;
    }
  }
}

}  // namespace optstate::ctl
