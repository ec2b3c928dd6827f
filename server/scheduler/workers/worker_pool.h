#ifndef OPTSTATE_SERVER_SCHEDULER_WORKERS_WORKER_POOL_H_
#define OPTSTATE_SERVER_SCHEDULER_WORKERS_WORKER_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "server/observe/trace_recorder.h"
#include "server/scheduler/index_range.h"
#include "server/scheduler/workers/worker_placement.h"

namespace optstate::scheduler {

// A fixed set of threads for work given as a number of independent indices. The
// caller works too, so a pool of n has n - 1 threads.
//
// Every participant has a contiguous share of the `total` indices, the same in
// each call, so that it finds its part of the state in its node's memory and in
// its caches. When its share is done it takes indices from others, those of its
// NUMA node first. Chance decides which participant does an index.
//
// The parts of a call, and the race that each part closes:
//   1. The caller writes body_, span_ and shares_, then opens gate_ (release).
//   A
//      thread joins by a compare-and-swap of gate_ (acquire) that only succeeds
//      while it is open, so it sees this call's fields or those of a later
//      call, never a mixture.
//   2. Every thread takes indices from each share's `next` until it is used up;
//      an index goes to the thread that adds to `next` when it has that value,
//      owner or not, so to one alone.
//   3. The caller closes the gate, so that no sleeper joins late, and waits
//      until all joined threads have left. It never waits for a thread that
//      slept through the call; other threads have done that thread's share.
//
// Threads: ParallelFor, or Start and its Finish, by one thread at a time, not
// from within a body. No lock is held while bodies run, nor to hand out
// indices. Allocates only in the constructor.
class WorkerPool {
 public:
  // `participants` >= 1 includes the caller. `spin` says whether waiting
  // threads look again for some microseconds before they sleep; it should be
  // false when there are fewer cores than runnable threads. `placement` has a
  // seat for each participant, or none. `trace` gets what participants do, and
  // outlives the pool; null: nothing is recorded.
  WorkerPool(int participants, bool spin, const WorkerPlacement& placement = {},
             observe::TraceRecorder* trace = nullptr);
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;
  ~WorkerPool();

  // Returns the participant of the thread that runs a body: 0 for the caller,
  // others below participants().
  static int CurrentParticipant();
  int participants() const { return static_cast<int>(participants_); }
  // Returns the source of the thread that runs a body; null: there is none.
  observe::TraceSource* trace() const {
    return traces_.empty()
               ? nullptr
               : traces_[static_cast<size_t>(CurrentParticipant())].get();
  }

  // Calls body(i) once for each i < count, in any order and on any thread;
  // returns when all are done. The writes of the bodies are visible to the
  // caller.
  void ParallelFor(size_t count, absl::FunctionRef<void(size_t)> body) {
    ParallelFor({0, count, count}, body);
  }
  // Does the same for a part of the indices; owners are those of the whole
  // range. `span`, a literal, is the name under which each participant's part
  // is recorded in a trace; null: it is not, or the bodies record their own.
  void ParallelFor(const IndexRange& range,
                   absl::FunctionRef<void(size_t)> body,
                   const char* span = nullptr) {
    Start(range, body, span);
    Finish();
  }
  // The two halves of ParallelFor(): the caller may do something else while the
  // threads begin, and works too from Finish() on. `body` lives until that
  // returns.
  void Start(const IndexRange& range, absl::FunctionRef<void(size_t)> body,
             const char* span = nullptr);
  void Finish();

  // Returns the indices of [0, total) that are a participant's own.
  static IndexRange ShareOf(size_t participant, size_t participants,
                            size_t total) {
    return {total * participant / participants,
            total * (participant + 1) / participants, total};
  }

 private:
  // A participant's part of the open call. Shares are on separate cache lines,
  // so that taking an index does not slow threads that take from another share.
  struct alignas(64) Share {
    std::atomic<size_t> next{0};
    size_t end = 0;
    // The participants of the share's node.
    size_t node_begin = 0;
    size_t node_end = 0;
  };
  static constexpr uint32_t kOpen = 1u << 31;  // the rest counts joined threads

  void FindNeighbours(const WorkerPlacement& placement);
  // Says whether the open call is not worth a thread's wake-up.
  bool IsForCaller() const {
    return range_.end - range_.begin <= 1 || threads_.empty();
  }
  void Run(int participant);
  bool Join();
  void Leave();
  // Return whether they have called the body.
  bool Work(size_t self);
  bool WorkOn(Share* share);
  // Calls the body for the next index of the share; false when it has none.
  bool TakeOne(Share* share);
  // Begins a span of the participant; 0: it is not recorded.
  int64_t BeginSpan(size_t participant) const {
    return span_ == nullptr || traces_.empty() ? 0
                                               : traces_[participant]->Begin();
  }
  void EndSpan(size_t participant, int64_t begin_ns) const {
    if (begin_ns == 0) return;
    traces_[participant]->RecordSince(begin_ns, span_, /*lane=*/0);
  }
  uint32_t AwaitDoorbell(uint32_t seen);
  void AwaitEmptyGate();

  const int spin_rounds_;
  const size_t participants_;
  const std::unique_ptr<Share[]> shares_;
  // By participant; empty: nothing is recorded.
  std::vector<std::unique_ptr<observe::TraceSource>> traces_;
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<uint32_t> gate_{0};
  alignas(64) std::atomic<uint32_t> doorbell_{0};  // counts calls
  std::atomic<bool> stop_{false};
  // Processor of the caller of the open call; -1: not known.
  std::atomic<int> caller_cpu_{-1};
  // These are of the open call.
  std::optional<absl::FunctionRef<void(size_t)>> body_;
  const char* span_ = nullptr;
  IndexRange range_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_WORKERS_WORKER_POOL_H_
