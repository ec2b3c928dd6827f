#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_COUNTS_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_COUNTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/scheduler/executors/device_load.h"
#include "server/scheduler/executors/update_batch.h"

namespace optstate::scheduler {

// Counts what an executor and its devices have done.
//
// Threads: thread-safe.
class DeviceCounts {
 public:
  // The work of one device since it was given its batches.
  struct DeviceCounters {
    size_t batches = 0;
    uint64_t batch_bytes = 0;  // of all; as many are pinned on the host
    uint64_t elements = 0;     // that it has updated
    uint64_t bytes_to_device = 0;
    uint64_t bytes_to_host = 0;
    uint64_t resident_elements = 0;  // that have a place there
    uint64_t resident_bytes = 0;     // of their places
    uint64_t shared_bytes = 0;       // of their parameters, for ranks
    uint64_t gradient_bytes = 0;     // that ranks had there: not copied there
    // The CPU has updated these, because a rank had other gradients there than
    // in its gradient area.
    uint64_t refused_elements = 0;
    DeviceLoad::Work recent;
    // Why it did not do a batch, last.
    absl::Status failure;
    bool is_lost = false;
  };
  struct Counters {
    uint64_t device_elements = 0;
    uint64_t cpu_elements = 0;
    // The elements of these that were the devices', and that no batch has room
    // for.
    uint64_t too_large_elements = 0;
    uint64_t log_bytes = 0;  // of host memory
    // Why a device did not do a batch, last; INTERNAL: it is lost.
    absl::Status failure;
    std::vector<DeviceCounters> devices;
  };

  Counters Get() const {
    const absl::MutexLock lock(&mu_);
    return counters_;
  }
  // Counts anew for so many devices.
  void BeginDevices(size_t devices);
  void NoteFailure(size_t device, const absl::Status& failure, bool is_lost);
  // Counts what a device has done, and what of it was refused.
  void CountBatch(size_t device, const UpdateBatch& batch);
  void CountCpu(uint64_t elements);
  // Notes that a task of the devices' part has become the CPU's.
  void CountTooLarge(uint64_t elements);
  // Lets `set` change what is a fact and no sum: memory, places and rates.
  void Set(absl::FunctionRef<void(Counters&)> set);

 private:
  mutable absl::Mutex mu_;
  Counters counters_ ABSL_GUARDED_BY(mu_);
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_COUNTS_H_
