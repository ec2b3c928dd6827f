#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BATCH_MEMORY_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BATCH_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/scheduler/executors/batch_times.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// The memory of one batch of updates on a device: pinned pages of the host,
// memory of the device, and the stream of the copies between them.
//
// Threads: as UpdateBatch.
class BatchMemory {
 public:
  // Kernels load vectors of this size.
  static constexpr uint64_t kAlignBytes = 16;
  static constexpr uint64_t Aligned(uint64_t bytes) {
    return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  }

  // `device` outlives the object. RESOURCE_EXHAUSTED: it lacks the memory;
  // other errors are those of the device or of the system.
  static absl::StatusOr<std::unique_ptr<BatchMemory>> Make(
      accelerator::Device* device, uint64_t host_bytes, uint64_t device_bytes);
  // Waits for what the stream does.
  ~BatchMemory();
  BatchMemory(const BatchMemory&) = delete;
  BatchMemory& operator=(const BatchMemory&) = delete;

  std::byte* host() const { return host_; }
  std::byte* HostAt(uint64_t offset) const { return host_ + offset; }
  accelerator::DeviceAddress device() const { return memory_; }
  accelerator::DeviceStream* stream() const { return stream_.get(); }

  // Marks the end of what was enqueued so far; Wait() waits for it, asleep.
  absl::Status MarkEnd() {
    Mark(Point::kEnd);
    return stream_->Record(is_over_.get());
  }
  absl::Status Wait() { return is_over_->Wait(); }

  // Points in the work of a batch, whose times are measured.
  enum class Point : uint8_t { kBegin, kCopied, kComputed, kEnd };
  static constexpr size_t kPoints = 4;
  // Has the device measure from now on, or not.
  void SetTimed(bool is_timed) { is_timed_ = is_timed; }
  // Marks that all that comes before the point was enqueued; kEnd is
  // MarkEnd()'s. A device that cannot measure costs the times alone.
  void Mark(Point point);
  // Returns the times, once Wait() has returned OK; nullopt: there are none.
  std::optional<BatchTimes> Times() const;

 private:
  BatchMemory(accelerator::Device* device, uint64_t host_bytes)
      : device_(*device), host_bytes_(host_bytes) {}
  absl::Status Init(uint64_t device_bytes);

  accelerator::Device& device_;
  const uint64_t host_bytes_;
  std::byte* host_ = nullptr;  // pages of their own, which can be registered
  bool is_registered_ = false;
  accelerator::DeviceAddress memory_;
  std::unique_ptr<accelerator::DeviceEvent> is_over_;
  std::array<std::unique_ptr<accelerator::DeviceEvent>, kPoints> points_;
  bool is_timed_ = false;
  int64_t begin_ns_ = 0;  // when kBegin was marked
  std::unique_ptr<accelerator::DeviceStream> stream_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BATCH_MEMORY_H_
