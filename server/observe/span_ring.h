#ifndef OPTSTATE_SERVER_OBSERVE_SPAN_RING_H_
#define OPTSTATE_SERVER_OBSERVE_SPAN_RING_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace optstate::observe {

// Something that was done, and when. Times are those of the steady clock.
struct Span {
  const char* name = "";  // a literal
  uint32_t lane = 0;      // of the source that records it
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  uint64_t step = 0;   // that it belongs to; 0: none
  uint64_t bytes = 0;  // that it moved; 0: not known
};

// A bounded queue of spans from one thread to another.
//
// Threads: one calls Push() and one Pop(). Either may be another thread than
// before, when something else orders the two. Allocates in the constructor
// alone, whose pages are there when it returns.
class SpanRing {
 public:
  // `capacity` is a power of two.
  explicit SpanRing(size_t capacity)
      : mask_(capacity - 1), spans_(std::make_unique<Span[]>(capacity)) {}
  SpanRing(const SpanRing&) = delete;
  SpanRing& operator=(const SpanRing&) = delete;

  size_t capacity() const { return mask_ + 1; }

  // Returns false, with nothing changed, when there is no room.
  bool Push(const Span& span) {
    const uint64_t end = end_.load(std::memory_order_relaxed);
    if (end - begin_.load(std::memory_order_acquire) > mask_) return false;
    spans_[end & mask_] = span;
    end_.store(end + 1, std::memory_order_release);
    return true;
  }
  // Returns false when there is none.
  bool Pop(Span* span) {
    const uint64_t begin = begin_.load(std::memory_order_relaxed);
    if (begin == end_.load(std::memory_order_acquire)) return false;
    *span = spans_[begin & mask_];
    begin_.store(begin + 1, std::memory_order_release);
    return true;
  }

 private:
  const size_t mask_;
  const std::unique_ptr<Span[]> spans_;
  // Spans are numbered; number n is at n & mask_. The two ends are on separate
  // cache lines, because different threads write them.
  alignas(64) std::atomic<uint64_t> end_{0};
  alignas(64) std::atomic<uint64_t> begin_{0};
};

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_SPAN_RING_H_
