#ifndef OPTSTATE_STORAGE_ACCELERATOR_EMULATED_STREAM_H_
#define OPTSTATE_STORAGE_ACCELERATOR_EMULATED_STREAM_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/accelerator/emulated_faults.h"
#include "storage/accelerator/emulated_memory.h"
#include "storage/accelerator/host_registry.h"

namespace optstate::accelerator {

// State that the streams of one emulated device share. Thread-safe.
struct EmulatedDeviceState {
  explicit EmulatedDeviceState(uint64_t memory_bytes) : memory(memory_bytes) {}

  // Says that the device is lost from now on. The first reason stays.
  void Lose(const absl::Status& why);
  // Returns why the device is lost.
  absl::Status lost() const;

  EmulatedMemory memory;
  HostRegistry host;
  EmulatedFaults* faults = nullptr;  // may be null
  uint64_t link_bytes_per_s = 0;     // 0: copies take no time of their own

 private:
  std::atomic<bool> is_lost_{false};
  mutable absl::Mutex mu_;
  absl::Status lost_ ABSL_GUARDED_BY(mu_);
};

class EmulatedEvent final : public DeviceEvent {
 public:
  explicit EmulatedEvent(const EmulatedDeviceState* device)
      : device_(*device) {}

  absl::Status Wait() override;
  absl::StatusOr<bool> IsOver() override;
  absl::StatusOr<int64_t> NanosSince(DeviceEvent* earlier) override;

  // Begins another record, and returns its number.
  uint64_t Record();
  uint64_t recorded() const;
  // For the streams: the record is over; waits for it.
  void End(uint64_t record);
  void Await(uint64_t record);

 private:
  // Returns when the last record was over. UNAVAILABLE: it is not.
  absl::StatusOr<int64_t> OverAt() const;

  const EmulatedDeviceState& device_;
  mutable absl::Mutex mu_;
  uint64_t recorded_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t over_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t over_at_ns_ ABSL_GUARDED_BY(mu_) = 0;  // of the steady clock
};

// A stream that is a thread with a queue. When the device is lost, it leaves
// the rest of its work undone, and wakes the threads that wait for it.
class EmulatedStream final : public DeviceStream {
 public:
  // The commands that a queue holds; further ones wait.
  static constexpr size_t kCommandsMax = 32;
  static constexpr size_t kArgumentBytesMax = 64;
  // Runs on the stream's thread. An error is what an illegal address is to a
  // device: it is lost.
  using Kernel = absl::Status (*)(const EmulatedMemory& memory,
                                  const void* arguments);

  // `device` outlives this.
  explicit EmulatedStream(EmulatedDeviceState* device);
  ~EmulatedStream() override;

  absl::Status CopyToDevice(DeviceAddress to, const void* from,
                            size_t bytes) override;
  absl::Status CopyToHost(void* to, DeviceAddress from, size_t bytes) override;
  absl::Status CopyOnDevice(DeviceAddress to, DeviceAddress from,
                            size_t bytes) override;
  absl::Status Record(DeviceEvent* event) override;
  absl::Status WaitFor(DeviceEvent* event) override;
  absl::Status Wait() override;
  void* native_handle() override { return this; }

  // Enqueues a kernel with a copy of its arguments, at most
  // kArgumentBytesMax bytes.
  absl::Status Launch(Kernel kernel, const void* arguments, size_t bytes);

 private:
  enum class Kind {
    kCopyToDevice,
    kCopyToHost,
    kCopyOnDevice,
    kKernel,
    kRecord,
    kWaitFor
  };
  struct Command {
    Kind kind = Kind::kKernel;
    std::byte* device = nullptr;
    std::byte* host = nullptr;  // kCopyOnDevice: where the device reads
    size_t bytes = 0;
    EmulatedEvent* event = nullptr;
    uint64_t record = 0;
    Kernel kernel = nullptr;
    alignas(16) std::byte arguments[kArgumentBytesMax];
  };

  absl::Status CheckCopy(const std::byte* device, const void* host,
                         size_t bytes) const;
  absl::Status Enqueue(const Command& command);
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return given_ - done_ < kCommandsMax;
  }
  bool IsIdle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return given_ == done_;
  }
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return given_ != done_ || ends_;
  }
  void Run();
  void Do(const Command& command);
  void DoWork(const Command& command);

  EmulatedDeviceState& device_;
  absl::Mutex mu_;
  // Commands are numbered; number n is at n % kCommandsMax.
  std::array<Command, kCommandsMax> commands_;
  uint64_t given_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t done_ ABSL_GUARDED_BY(mu_) = 0;
  bool ends_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_EMULATED_STREAM_H_
