#ifndef OPTSTATE_SERVER_TRANSPORT_REPLY_QUEUE_H_
#define OPTSTATE_SERVER_TRANSPORT_REPLY_QUEUE_H_

#include <cstddef>
#include <deque>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "optstate/v1/session.pb.h"

namespace optstate {

// Replies of one stream on their way to the thread that writes them.
//
// Room is reserved before a request is carried out, by the thread that reads
// requests, which thereby waits for a peer that does not read its replies. So
// Push() never waits, whoever calls it, and the queue stays bounded.
//
// Invariant: reserved + queued <= capacity.
// Threads: thread-safe.
class ReplyQueue {
 public:
  explicit ReplyQueue(size_t capacity) : capacity_(capacity) {}

  // Waits for room; false: the queue is closed, and nothing was reserved.
  bool Reserve() ABSL_LOCKS_EXCLUDED(mutex_);
  // Uses one reservation. A closed queue drops the reply.
  void Push(v1::SessionReply reply) ABSL_LOCKS_EXCLUDED(mutex_);
  // The next reply; nothing once the queue is closed and empty. It takes room
  // until the next call, so that what is being written counts.
  std::optional<v1::SessionReply> Pop() ABSL_LOCKS_EXCLUDED(mutex_);

  // No more replies come; those queued can still be popped.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);
  // As Close(), and drops those queued: the peer is gone.
  void Abandon() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool HasRoomOrClosed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return closed_ || reserved_ + replies_.size() + writing_ < capacity_;
  }
  bool HasReplyOrClosed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return closed_ || !replies_.empty();
  }

  const size_t capacity_;
  absl::Mutex mutex_;
  std::deque<v1::SessionReply> replies_ ABSL_GUARDED_BY(mutex_);
  size_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t writing_ ABSL_GUARDED_BY(mutex_) = 0;  // 0 or 1
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_TRANSPORT_REPLY_QUEUE_H_
