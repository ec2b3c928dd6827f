#include "server/transport/grpc/reply_queue.h"

#include <utility>

namespace optstate::transport {
namespace {

// Returns a reply's bytes; never 0, so that every reply counts.
size_t BytesOf(const v1::SessionReply& reply) {
  return sizeof(v1::SessionReply) + reply.ByteSizeLong();
}

}  // namespace

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
  if (!closed_) Append(std::move(reply));
}

void ReplyQueue::Offer(v1::SessionReply reply) {
  absl::MutexLock lock(&mutex_);
  if (!closed_ && HasRoomOrClosed()) Append(std::move(reply));
}

void ReplyQueue::Append(v1::SessionReply reply) {
  queued_bytes_ += BytesOf(reply);
  replies_.push_back(std::move(reply));
  NoteLength();
}

void ReplyQueue::NoteLength() {
  length_.store(replies_.size() + (writing_bytes_ > 0 ? 1 : 0),
                std::memory_order_relaxed);
}

std::optional<v1::SessionReply> ReplyQueue::Pop(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  writing_bytes_ = 0;
  NoteLength();
  mutex_.AwaitWithDeadline(absl::Condition(this, &ReplyQueue::HasNews),
                           deadline);
  nudged_ = false;
  if (replies_.empty()) return std::nullopt;
  v1::SessionReply reply = std::move(replies_.front());
  replies_.pop_front();
  writing_bytes_ = BytesOf(reply);
  queued_bytes_ -= writing_bytes_;
  NoteLength();
  return reply;
}

bool ReplyQueue::over() const {
  absl::MutexLock lock(&mutex_);
  return closed_ && replies_.empty();
}

void ReplyQueue::Nudge() {
  absl::MutexLock lock(&mutex_);
  nudged_ = true;
}

void ReplyQueue::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
}

void ReplyQueue::Abandon() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  replies_.clear();
  queued_bytes_ = 0;
  NoteLength();
}

}  // namespace optstate::transport
