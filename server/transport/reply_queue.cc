#include "server/transport/reply_queue.h"

#include <utility>

namespace optstate {

bool ReplyQueue::Reserve() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &ReplyQueue::HasRoomOrClosed));
  if (closed_) return false;
  ++reserved_;
  return true;
}

void ReplyQueue::Push(v1::SessionReply reply) {
  absl::MutexLock lock(&mutex_);
  --reserved_;
  if (!closed_) replies_.push_back(std::move(reply));
}

std::optional<v1::SessionReply> ReplyQueue::Pop() {
  absl::MutexLock lock(&mutex_);
  writing_ = 0;
  mutex_.Await(absl::Condition(this, &ReplyQueue::HasReplyOrClosed));
  if (replies_.empty()) return std::nullopt;
  v1::SessionReply reply = std::move(replies_.front());
  replies_.pop_front();
  writing_ = 1;
  return reply;
}

void ReplyQueue::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
}

void ReplyQueue::Abandon() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  replies_.clear();
}

}  // namespace optstate
