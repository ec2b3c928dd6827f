#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_GRADIENTS_WRITER_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_GRADIENTS_WRITER_H_

#include <fcntl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "proto/shm/device_gradients.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/layout.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/scheduler/executors/shared_gradients.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// A rank's side of gradients that are shared on a device: each parameter has a
// place for a whole tile.
class GradientsWriter {
 public:
  static constexpr uint64_t kPlaceBytes = kTileElements * sizeof(float);

  // Errors are those of the device.
  static absl::StatusOr<std::unique_ptr<GradientsWriter>> Make(
      std::unique_ptr<accelerator::Device> device, uint64_t parameters) {
    auto made = absl::WrapUnique(new GradientsWriter(std::move(device)));
    OPTSTATE_ASSIGN_OR_RETURN(made->memory_, made->device_->AllocateShareable(
                                                 parameters * kPlaceBytes));
    OPTSTATE_ASSIGN_OR_RETURN(
        made->table_, shm::SealedSegment::Create(
                          "gradients", shm::DeviceGradientsBytes(parameters)));
    made->header()->magic = shm::kDeviceGradientsMagic;
    made->header()->version = shm::kDeviceGradientsVersion;
    made->header()->segment_bytes = made->table_.size();
    made->header()->parameter_count = parameters;
    OPTSTATE_RETURN_IF_ERROR(
        made->device_->RegisterHost(absl::MakeSpan(made->buffer_)));
    OPTSTATE_ASSIGN_OR_RETURN(made->stream_, made->device_->MakeStream());
    return made;
  }
  GradientsWriter(const GradientsWriter&) = delete;
  GradientsWriter& operator=(const GradientsWriter&) = delete;
  ~GradientsWriter() {
    stream_.reset();
    if (!memory_.is_null()) device_->Free(memory_);
    device_->UnregisterHost(buffer_.data());
  }

  // Returns what is to be mapped, but for what the engine knows.
  absl::StatusOr<SharedGradients::Shared> Share() const {
    SharedGradients::Shared shared;
    OPTSTATE_ASSIGN_OR_RETURN(shared.memory, device_->Export(memory_));
    shared.table = UniqueFd(fcntl(table_.fd(), F_DUPFD_CLOEXEC, 0));
    shared.parameter_count = header()->parameter_count;
    return shared;
  }
  // Copies a gradient to the device. `is_right`: else with another last sign.
  void Copy(uint32_t parameter, absl::Span<const std::byte> gradient,
            bool is_right = true) {
    Mark(parameter, 0);
    ASSERT_LE(gradient.size(), buffer_.size());
    std::memcpy(buffer_.data(), gradient.data(), gradient.size());
    if (!is_right) buffer_[gradient.size() - 1] ^= std::byte{0x80};
    absl::Status status = stream_->CopyToDevice(
        memory_ + parameter * kPlaceBytes, buffer_.data(), gradient.size());
    status.Update(stream_->Wait());
    ASSERT_TRUE(status.ok()) << status;
  }
  // Says that the parameter's gradient of a step is there.
  void Mark(uint32_t parameter, uint64_t step) {
    auto* const entries = reinterpret_cast<shm::DeviceGradient*>(header() + 1);
    entries[parameter].place = parameter * kPlaceBytes;
    entries[parameter].step = step;
  }

 private:
  explicit GradientsWriter(std::unique_ptr<accelerator::Device> device)
      : device_(std::move(device)), buffer_(kPlaceBytes) {}
  shm::DeviceGradientsHeader* header() const {
    return reinterpret_cast<shm::DeviceGradientsHeader*>(table_.data());
  }

  const std::unique_ptr<accelerator::Device> device_;
  std::vector<std::byte> buffer_;
  accelerator::DeviceAddress memory_;
  shm::SealedSegment table_;
  std::unique_ptr<accelerator::DeviceStream> stream_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_GRADIENTS_WRITER_H_
