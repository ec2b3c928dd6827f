#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_PARAMETERS_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_PARAMETERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/shm/device_parameters.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/unique_fd.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// The files by which a rank copies parameters from a device.
struct DeviceParameters {
  UniqueFd table;  // proto/shm/device_parameters.h
  size_t device = 0;
  accelerator::ExportedMemory memory;
};

// Copies of parameters in memory of devices, which ranks map, so that a rank on
// the same device gets its new parameters without a way through host memory.
// They are copies, and nothing reads them here: a rank that wrote there would
// harm itself, and other ranks of its job on that device, but neither records
// nor the parameter area.
//
// Threads: Open(), Close() and AddPlace() by one while no other uses the
// object; the rest by many at once, for different runs.
class SharedParameters {
 public:
  static constexpr uint64_t kNoPlace = ~uint64_t{0};
  static constexpr uint64_t kAlignBytes = 16;
  static constexpr uint64_t Aligned(uint64_t bytes) {
    return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  }

  // Makes the table. `devices` outlive the object. RESOURCE_EXHAUSTED: there is
  // no memory for it.
  static absl::StatusOr<std::unique_ptr<SharedParameters>> Make(
      absl::Span<accelerator::Device* const> devices, uint64_t run_count);
  SharedParameters(const SharedParameters&) = delete;
  SharedParameters& operator=(const SharedParameters&) = delete;
  // Tells ranks that it is over. Those that have mapped the memory keep it
  // until they unmap it.
  ~SharedParameters();

  // Takes memory of a device, unless it was taken before. Errors are those of
  // Device::AllocateShareable().
  absl::Status Open(size_t device, uint64_t bytes);
  // Gives it back, before any run has a place there.
  void Close(size_t device);
  bool is_open(size_t device) const {
    return !memories_[device].begin.is_null();
  }
  uint64_t bytes(size_t device) const { return memories_[device].bytes; }
  // Gives a run a place, behind the one that was given before, and returns its
  // offset; kNoPlace: the device has no room.
  uint64_t AddPlace(size_t device, uint64_t run, uint64_t bytes);
  accelerator::DeviceAddress At(size_t device, uint64_t place) const {
    return memories_[device].begin + place;
  }
  // Says that the values at the run's place are about to be others than those
  // in the parameter area; that they are those of a step there.
  void MarkStale(uint64_t run) { Set(run, 0); }
  void MarkCurrent(uint64_t run, uint64_t step) { Set(run, step); }

  // Returns what a rank on an open device gets. Errors are those of
  // Device::Export() and of the system.
  absl::StatusOr<DeviceParameters> Export(size_t device) const;

 private:
  struct Memory {
    accelerator::Device* device = nullptr;
    accelerator::DeviceAddress begin;  // null: none was taken
    uint64_t bytes = 0;
    uint64_t used_bytes = 0;
  };

  SharedParameters() = default;
  shm::DeviceParametersHeader* header() const {
    return reinterpret_cast<shm::DeviceParametersHeader*>(table_.data());
  }
  shm::DeviceParameterRun& entry(uint64_t run) const {
    return reinterpret_cast<shm::DeviceParameterRun*>(header() + 1)[run];
  }
  // Before the run's stamp, which a rank reads first: who sees a step sees the
  // place too, and that the values are there.
  void Set(uint64_t run, uint64_t step) {
    entry(run).step.store(step, std::memory_order_seq_cst);
  }

  shm::SealedSegment table_;
  std::vector<Memory> memories_;  // by device
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_PARAMETERS_H_
