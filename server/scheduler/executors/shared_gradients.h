#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_GRADIENTS_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_GRADIENTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "proto/shm/device_gradients.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/partition.h"
#include "proto/types/unique_fd.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// Gradients that ranks have in memory of devices besides their gradient areas,
// so that a device that updates records need not be given them by the host.
// Ranks own the memory and the tables that say what is there; both are only
// read here. The area is what counts: who uses what Find() returns copies it,
// and compares the digest of the copy with that of the area's bytes.
//
// Threads: Map(), Unmap() and the destructor by one thread, while no other uses
// the object and no device copies from what was mapped; the rest by many.
class SharedGradients {
 public:
  // A rank's memory, as the rank has sent it, and the rank's gradient area.
  struct Shared {
    uint32_t rank = 0;
    accelerator::Device* device = nullptr;  // outlives this
    size_t device_index = 0;
    accelerator::ExportedMemory memory;
    UniqueFd table;
    const std::byte* area = nullptr;
    uint64_t parameter_count = 0;  // of the layout
  };

  SharedGradients() = default;
  SharedGradients(const SharedGradients&) = delete;
  SharedGradients& operator=(const SharedGradients&) = delete;
  ~SharedGradients();

  // Maps a rank's memory and table in place of its former ones. `partition`:
  // the rank's. INVALID_ARGUMENT: they are not what they have to be; other
  // errors are those of Device::Import(). After an error the rank has none.
  absl::Status Map(Shared shared, const RankPartition& partition);
  // Frees what the rank has. Idempotent.
  void Unmap(uint32_t rank);
  bool empty() const { return ranks_.empty(); }

  // Returns where the device has `bytes` of a gradient of a step, which begin
  // at this address of a rank's gradient area; null: it has not.
  accelerator::DeviceAddress Find(size_t device_index, uint32_t parameter,
                                  uint64_t step, const void* gradient,
                                  uint64_t bytes) const;
  // Says that the device had others in that place than the gradient area at
  // this address: nothing counts any more that the rank has on the device.
  void Distrust(const void* gradient) const;

 private:
  struct Rank {
    uint32_t rank = 0;
    accelerator::Device* device = nullptr;
    size_t device_index = 0;
    accelerator::DeviceAddress memory;
    uint64_t memory_bytes = 0;
    shm::PeerSegment table;
    uint64_t parameter_count = 0;
    const std::byte* area = nullptr;
    RankPartition partition;
    std::atomic<bool> is_distrusted{false};

    bool HasInArea(const void* gradient) const {
      const auto* const at = static_cast<const std::byte*>(gradient);
      return at >= area && at < area + partition.gradient_area_bytes;
    }
    const shm::DeviceGradient& entry(uint32_t parameter) const {
      const auto* const header =
          reinterpret_cast<const shm::DeviceGradientsHeader*>(table.data());
      return reinterpret_cast<const shm::DeviceGradient*>(header +
                                                          1)[parameter];
    }
  };

  static absl::Status CheckTable(const shm::PeerSegment& table,
                                 uint64_t parameter_count);

  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_GRADIENTS_H_
