#ifndef OPTSTATE_SERVER_TRANSPORT_GRPC_REPLY_QUEUE_H_
#define OPTSTATE_SERVER_TRANSPORT_GRPC_REPLY_QUEUE_H_

#include <atomic>
#include <cstddef>
#include <deque>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/session.pb.h"

namespace optstate::transport {

// Replies of one stream on their way to the thread that writes them.
//
// Room is reserved before a request is carried out, by the thread that reads
// requests, which thereby waits for a peer that does not read its replies. So
// Push() never waits on any thread, and the queue stays bounded.
//
// Two limits: `replies_max` is more than a rank has requests in flight, because
// a rank that is sending may not be reading, and both sides would wait for each
// other; `bytes_max` bounds the memory of large replies.
//
// Invariants: reserved + queued <= replies_max; queued bytes <= bytes_max, plus
// one reply. The reply being written counts as queued. Threads: thread-safe.
class ReplyQueue {
 public:
  ReplyQueue(size_t replies_max, size_t bytes_max)
      : replies_max_(replies_max), bytes_max_(bytes_max) {}

  // Waits for room; false: the queue is closed, and nothing was reserved.
  bool Reserve() ABSL_LOCKS_EXCLUDED(mutex_);
  // Queues a reply, using one reservation. A closed queue drops it.
  void Push(v1::SessionReply reply) ABSL_LOCKS_EXCLUDED(mutex_);
  // Queues a reply without a reservation, if there is room just now; for
  // replies that may be lost.
  void Offer(v1::SessionReply reply) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes the next reply; nullopt when there is none before the deadline or the
  // next Nudge(), or when the queue is over(). The reply counts as queued until
  // the next call.
  std::optional<v1::SessionReply> Pop(
      absl::Time deadline = absl::InfiniteFuture()) ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns whether the queue is closed and empty.
  bool over() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Wakes the thread in Pop(), which has something else to do.
  void Nudge() ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns how many replies are queued. It takes no lock.
  size_t length() const { return length_.load(std::memory_order_relaxed); }

  // Takes no more replies; those queued can still be popped.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);
  // Closes the queue and drops the queued replies: the peer is gone.
  void Abandon() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Append(v1::SessionReply reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Publishes the length after a change.
  void NoteLength() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoomOrClosed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool writing = writing_bytes_ > 0;
    return closed_ ||
           (reserved_ + replies_.size() + (writing ? 1 : 0) < replies_max_ &&
            queued_bytes_ + writing_bytes_ < bytes_max_);
  }
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return closed_ || nudged_ || !replies_.empty();
  }

  const size_t replies_max_;
  const size_t bytes_max_;
  mutable absl::Mutex mutex_;
  std::deque<v1::SessionReply> replies_ ABSL_GUARDED_BY(mutex_);
  size_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t writing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none
  bool nudged_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<size_t> length_{0};
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_GRPC_REPLY_QUEUE_H_
