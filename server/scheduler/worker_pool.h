#ifndef OPTSTATE_SERVER_SCHEDULER_WORKER_POOL_H_
#define OPTSTATE_SERVER_SCHEDULER_WORKER_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace optstate {

// A fixed set of threads for work that is known as a number of independent
// indices. The caller works too, so a pool of n has n - 1 threads.
//
// How a call goes, and the race each part closes:
//   1. The caller writes body_ and count_, resets next_, then opens gate_
//      (release). A thread joins by a compare-and-swap of gate_ (acquire) that
//      only succeeds while it is open, so it sees this call's fields or those
//      of a later call, never a mixture.
//   2. Everyone takes indices from next_ until they are used up.
//   3. The caller closes the gate, so that no sleeper joins late, and waits
//      until those who joined have left. It never waits for a thread that slept
//      through the call.
//
// Threads: ParallelFor by one thread at a time, not from within a body. No lock
// is held while bodies run. Allocates only in the constructor.
class WorkerPool {
 public:
  // `participants` >= 1 includes the caller. `spin` says whether those who wait
  // look again for some microseconds before they sleep; wrong when there are
  // fewer cores than runnable threads.
  WorkerPool(int participants, bool spin);
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;
  ~WorkerPool();

  // Of the thread that runs a body: 0 for the caller, others below
  // participants().
  static int CurrentParticipant();
  int participants() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls body(i) once for each i < count, in any order and on any thread;
  // returns when all are done. What the bodies wrote is visible to the caller.
  void ParallelFor(size_t count, absl::FunctionRef<void(size_t)> body);

 private:
  static constexpr uint32_t kOpen = 1u << 31;  // the rest counts who joined

  void Run(int participant);
  bool Join();
  void Leave();
  void Work();
  uint32_t AwaitDoorbell(uint32_t seen);
  void AwaitEmptyGate();

  const int spin_rounds_;
  std::vector<std::thread> threads_;
  // Apart, so that taking an index does not slow those who look at the gate.
  alignas(64) std::atomic<size_t> next_{0};
  alignas(64) std::atomic<uint32_t> gate_{0};
  alignas(64) std::atomic<uint32_t> doorbell_{0};  // counts calls
  std::atomic<bool> stop_{false};
  // Of the call that is open.
  const absl::FunctionRef<void(size_t)>* body_ = nullptr;
  size_t count_ = 0;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SCHEDULER_WORKER_POOL_H_
