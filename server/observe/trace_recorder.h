#ifndef OPTSTATE_SERVER_OBSERVE_TRACE_RECORDER_H_
#define OPTSTATE_SERVER_OBSERVE_TRACE_RECORDER_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/observe/span_ring.h"

namespace optstate::v1 {
class TraceChunk;
}  // namespace optstate::v1

namespace optstate::observe {

class TraceLanes;
class TraceRecorder;
struct LaneFamily;

// The present time of the steady clock. No system call where the kernel has one
// that can be read without.
inline int64_t TraceNowNs() {
  return std::chrono::nanoseconds(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The name of a lane, see v1::TraceLane.
struct LaneName {
  std::string group;
  std::string name;
};

// One thread's, or one lock's, way into a trace: it has lanes, which it numbers
// as it likes.
//
// When no trace is under way, a span costs one relaxed load of an atomic and a
// branch that is foreseen. When one is, it is put into a ring of the source's
// own: no allocation, no lock, no system call, no wait. A span for which the
// ring has no room is counted as lost.
//
// Threads: one at a time calls Record(), so that something orders two threads
// that do: the lock of a job, the end of a pass. Other methods: any.
class TraceSource {
 public:
  // `recorder` outlives the source. `name_lane` names a lane when its first
  // span is sent; it is called by any thread, with the recorder's lock held.
  TraceSource(TraceRecorder* recorder,
              std::function<LaneName(uint32_t lane)> name_lane);
  TraceSource(const TraceSource&) = delete;
  TraceSource& operator=(const TraceSource&) = delete;
  // Recorded spans are still sent.
  ~TraceSource();

  // Returns whether what is recorded now is kept.
  inline bool on() const;
  // Returns the present time, or 0 when no trace is under way: the beginning of
  // a span for Record().
  int64_t Begin() const { return on() ? TraceNowNs() : 0; }
  // Returns the step that is under way in the trace.
  inline uint64_t step() const;
  void Record(const Span& span);
  // Records a span that ends now. No effect when `begin_ns`, of Begin(), is 0.
  void RecordSince(int64_t begin_ns, const char* name, uint32_t lane,
                   uint64_t bytes = 0) {
    if (begin_ns == 0) return;
    Record({name, lane, begin_ns, TraceNowNs(), step(), bytes});
  }

 private:
  friend class TraceRecorder;

  TraceRecorder& recorder_;
  const std::function<LaneName(uint32_t lane)> name_lane_;
  std::atomic<SpanRing*> ring_{nullptr};   // null: no trace is under way
  std::atomic<bool> is_recording_{false};  // in Record(), perhaps in the ring
  std::atomic<uint64_t> lost_{0};
  // The recorder's, under its lock.
  std::unique_ptr<SpanRing> own_ring_;
  std::vector<LaneFamily*> families_;  // by lane; null: not named yet
};

// Records one trace at a time of what a job's engine does, from the first push
// of a step to the end of the last step that is asked for.
//
// A trace: Begin(), Arm(), Take() now and then, Disarm(), End(). Spans from
// before the first step, and from after the last one, are left out.
//
// Rings exist from Begin() to End(). End() takes each ring out of its source,
// then waits until no thread is inside Record() of that source, which is a
// matter of nanoseconds, and frees it: a thread that comes later finds none.
//
// Threads: on() and step(): any. Arm(), Disarm(), BeginStep(), EndStep() and
// DropStep() exclude each other: the job's lock sees to it. Begin(), Take() and
// End() are called by the one that has begun the trace. Nothing but Begin(),
// End() and the ends of sources allocates or takes a lock, Take() aside.
class TraceRecorder {
 public:
  // The limit of all rings together, as far as the least of each allows.
  static constexpr size_t kRingsBytesMax = size_t{32} << 20;
  static constexpr size_t kRingSpansMin = 256;
  static constexpr size_t kRingSpansMax = 8192;
  // The most spans of one chunk, which has to stay below the 4 MiB that gRPC
  // takes by default.
  static constexpr int kChunkSpansMax = 20000;

  TraceRecorder();
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;
  // No source is left, and no trace is under way.
  ~TraceRecorder();

  bool on() const { return on_.load(std::memory_order_relaxed); }
  uint64_t step() const { return step_.load(std::memory_order_relaxed); }

  // Begins a trace of so many steps, which records nothing yet.
  // FAILED_PRECONDITION: one is under way.
  absl::Status Begin(uint32_t steps);
  // Records from now on, or from the beginning of the next step.
  void Arm();
  // Adds what is new to an empty chunk. Returns whether there is more.
  bool Take(v1::TraceChunk* chunk);
  // Records nothing from now on.
  void Disarm() { on_.store(false, std::memory_order_relaxed); }
  // Ends the trace; what Take() has not taken is dropped.
  void End();

  // The first push of a step has come; the step is over; it is given up, and
  // begins anew if at all.
  void BeginStep(uint64_t step);
  void EndStep();
  void DropStep() { has_step_.store(false, std::memory_order_relaxed); }

  // How far the trace is: whether all steps are over, whether one is open, and
  // how often one has begun or ended.
  bool is_over() const { return last_ns_.load(std::memory_order_acquire) != 0; }
  bool has_step() const { return has_step_.load(std::memory_order_relaxed); }
  uint64_t turns() const { return turns_.load(std::memory_order_relaxed); }
  uint32_t steps() const { return steps_.load(std::memory_order_acquire); }

 private:
  friend class TraceSource;

  void Add(TraceSource* source);
  void Remove(TraceSource* source);
  void GiveRing(TraceSource* source) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static void TakeRing(TraceSource* source);
  // Moves spans of the source to `chunk`, as far as it has room. Returns
  // whether there are more.
  bool Drain(TraceSource* source, v1::TraceChunk* chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Send(const Span& span, TraceSource* source, v1::TraceChunk* chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  LaneFamily* FamilyOf(TraceSource* source, uint32_t lane)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::atomic<bool> on_{false};
  std::atomic<uint64_t> step_{0};
  std::atomic<bool> has_step_{false};
  std::atomic<uint64_t> turns_{0};
  std::atomic<uint32_t> steps_{0};    // that are over
  std::atomic<int64_t> first_ns_{0};  // the first step's beginning; 0: none yet
  std::atomic<int64_t> last_ns_{0};   // the last step's end; 0: not yet
  uint32_t steps_max_ = 0;            // of the trace

  absl::Mutex mu_;
  std::vector<TraceSource*> sources_ ABSL_GUARDED_BY(mu_);
  bool is_under_way_ ABSL_GUARDED_BY(mu_) = false;
  size_t ring_spans_ ABSL_GUARDED_BY(mu_) = kRingSpansMin;
  int64_t epoch_ns_ ABSL_GUARDED_BY(mu_) = 0;     // times count from it
  int64_t began_at_ns_ ABSL_GUARDED_BY(mu_) = 0;  // the same, of the wall clock
  std::unique_ptr<TraceLanes> lanes_ ABSL_GUARDED_BY(mu_);
  // Spans of sources that have ended.
  std::unique_ptr<v1::TraceChunk> left_ ABSL_GUARDED_BY(mu_);
};

inline bool TraceSource::on() const { return recorder_.on(); }
inline uint64_t TraceSource::step() const { return recorder_.step(); }

// Records the time from its construction to its end, if a trace is under way
// all the time.
class ScopedSpan {
 public:
  // `source` may be null: nothing is recorded. `name` is a literal.
  ScopedSpan(TraceSource* source, const char* name, uint32_t lane = 0)
      : source_(source),
        name_(name),
        lane_(lane),
        begin_ns_(source == nullptr ? 0 : source->Begin()) {}
  ~ScopedSpan() {
    if (begin_ns_ != 0) source_->RecordSince(begin_ns_, name_, lane_);
  }
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  TraceSource* const source_;
  const char* const name_;
  const uint32_t lane_;
  const int64_t begin_ns_;
};

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_TRACE_RECORDER_H_
