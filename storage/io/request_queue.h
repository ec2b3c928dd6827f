#ifndef OPTSTATE_STORAGE_IO_REQUEST_QUEUE_H_
#define OPTSTATE_STORAGE_IO_REQUEST_QUEUE_H_

#include <cstddef>

#include "storage/io/io_engine.h"

namespace optstate::io {

// A queue of requests, linked through IoRequest::next. It owns none of them.
// Not thread-safe.
class RequestQueue {
 public:
  bool empty() const { return first_ == nullptr; }

  void PushBack(IoRequest* request) {
    request->next = nullptr;
    if (empty()) {
      first_ = request;
    } else {
      last_->next = request;
    }
    last_ = request;
  }
  // Puts a request before all others.
  void PushFront(IoRequest* request) {
    request->next = first_;
    if (empty()) last_ = request;
    first_ = request;
  }
  // Returns the first request, null when there is none.
  IoRequest* Pop() {
    IoRequest* const request = first_;
    if (request == nullptr) return nullptr;
    first_ = request->next;
    request->next = nullptr;
    return request;
  }
  // Moves all requests of `other` to the end of this queue.
  void Append(RequestQueue* other) {
    if (other->empty()) return;
    if (empty()) {
      first_ = other->first_;
    } else {
      last_->next = other->first_;
    }
    last_ = other->last_;
    other->first_ = nullptr;
  }

 private:
  IoRequest* first_ = nullptr;
  IoRequest* last_ = nullptr;  // valid unless empty
};

// A queue for each class of requests.
class PriorityQueues {
 public:
  void PushBack(IoRequest* request) { Of(request).PushBack(request); }
  // Puts a request before all others of its class.
  void PushFront(IoRequest* request) { Of(request).PushFront(request); }
  // Returns the first request of the most urgent class, null when there is
  // none.
  IoRequest* Pop() {
    for (RequestQueue& queue : queues_) {
      if (IoRequest* const request = queue.Pop()) return request;
    }
    return nullptr;
  }
  bool empty() const {
    for (const RequestQueue& queue : queues_) {
      if (!queue.empty()) return false;
    }
    return true;
  }
  // Moves all requests of `other` to the ends of these queues.
  void Append(PriorityQueues* other) {
    for (int i = 0; i < kIoPriorityCount; ++i) {
      queues_[i].Append(&other->queues_[i]);
    }
  }

 private:
  RequestQueue& Of(const IoRequest* request) {
    return queues_[static_cast<size_t>(request->priority)];
  }

  RequestQueue queues_[kIoPriorityCount];
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_REQUEST_QUEUE_H_
