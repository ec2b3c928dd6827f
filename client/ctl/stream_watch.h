#ifndef OPTSTATE_CLIENT_CTL_STREAM_WATCH_H_
#define OPTSTATE_CLIENT_CTL_STREAM_WATCH_H_

#include <grpcpp/client_context.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {

// Cancels a streaming call when nothing comes for too long, or at an interrupt.
//
// Threads: thread-safe.
class StreamWatch {
 public:
  // `context` outlives the object. `interrupt` becomes readable when the call
  // is to be cancelled.
  StreamWatch(grpc::ClientContext* context, absl::Duration silence_max,
              int interrupt);
  ~StreamWatch();
  StreamWatch(const StreamWatch&) = delete;
  StreamWatch& operator=(const StreamWatch&) = delete;

  // Notes that something has come.
  void Touch() { heard_ns_ = absl::ToUnixNanos(absl::Now()); }
  // Say why the call was cancelled.
  bool was_interrupted() const { return was_interrupted_; }
  bool was_silent() const { return was_silent_; }

 private:
  void Run();

  grpc::ClientContext* const context_;
  const absl::Duration silence_max_;
  const int interrupt_;
  const UniqueFd end_;  // readable when the call is over
  std::atomic<int64_t> heard_ns_;
  std::atomic<bool> was_interrupted_ = false;
  std::atomic<bool> was_silent_ = false;
  std::thread thread_;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_STREAM_WATCH_H_
