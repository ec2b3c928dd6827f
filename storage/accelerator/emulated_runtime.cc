#include "storage/accelerator/emulated_runtime.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/accelerator/emulated_stream.h"

namespace optstate::accelerator {
namespace {

DeviceInfo InfoOf(const EmulatedOptions& options, size_t index) {
  return {absl::StrCat("emulated device ", index), options.memory_bytes,
          absl::StrCat("emulated-", index)};
}

class EmulatedDevice final : public Device {
 public:
  EmulatedDevice(const EmulatedOptions& options, size_t index)
      : info_(InfoOf(options, index)), state_(options.memory_bytes) {
    state_.faults = options.faults;
    state_.link_bytes_per_s = options.link_bytes_per_s;
  }

  const DeviceInfo& info() const override { return info_; }

  absl::StatusOr<DeviceAddress> Allocate(uint64_t bytes) override {
    OPTSTATE_RETURN_IF_ERROR(state_.lost());
    return state_.memory.Allocate(bytes);
  }
  absl::StatusOr<DeviceAddress> AllocateShareable(uint64_t bytes) override {
    OPTSTATE_RETURN_IF_ERROR(state_.lost());
    return state_.memory.AllocateShareable(bytes);
  }
  absl::StatusOr<ExportedMemory> Export(DeviceAddress memory) override {
    OPTSTATE_RETURN_IF_ERROR(state_.lost());
    if (state_.faults != nullptr && state_.faults->RefusesExport()) {
      return absl::FailedPreconditionError("an injected refusal of an export");
    }
    ExportedMemory exported;
    OPTSTATE_ASSIGN_OR_RETURN(exported.file,
                              state_.memory.Export(memory, &exported.bytes));
    exported.device = info_.id;
    return exported;
  }
  absl::StatusOr<DeviceAddress> Import(
      const ExportedMemory& exported) override {
    OPTSTATE_RETURN_IF_ERROR(state_.lost());
    if (exported.device != info_.id) {
      return absl::InvalidArgumentError(
          absl::StrCat("memory of ", exported.device, " for ", info_.id));
    }
    return state_.memory.Import(exported.file.get(), exported.bytes);
  }
  void Free(DeviceAddress memory) override { state_.memory.Free(memory); }

  absl::Status RegisterHost(absl::Span<std::byte> memory) override {
    OPTSTATE_RETURN_IF_ERROR(state_.lost());
    return state_.host.Add(memory);
  }
  void UnregisterHost(std::byte* begin) override { state_.host.Remove(begin); }

  absl::StatusOr<std::unique_ptr<DeviceStream>> MakeStream() override {
    OPTSTATE_RETURN_IF_ERROR(state_.lost());
    return std::make_unique<EmulatedStream>(&state_);
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> MakeEvent() override {
    OPTSTATE_RETURN_IF_ERROR(state_.lost());
    return std::make_unique<EmulatedEvent>(&state_);
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> MakeTimedEvent() override {
    return MakeEvent();  // each one knows
  }

 private:
  const DeviceInfo info_;
  EmulatedDeviceState state_;
};

class EmulatedRuntime final : public DeviceRuntime {
 public:
  explicit EmulatedRuntime(const EmulatedOptions& options)
      : options_(options) {}

  absl::StatusOr<std::vector<DeviceInfo>> Devices() override {
    std::vector<DeviceInfo> devices;
    for (size_t i = 0; i < options_.devices; ++i) {
      devices.push_back(InfoOf(options_, i));
    }
    return devices;
  }
  absl::StatusOr<std::unique_ptr<Device>> Open(size_t index) override {
    if (index >= options_.devices) {
      return absl::NotFoundError(absl::StrCat(
          "device ", index, " of ", options_.devices, " emulated ones"));
    }
    return std::make_unique<EmulatedDevice>(options_, index);
  }

 private:
  const EmulatedOptions options_;
};

}  // namespace

std::unique_ptr<DeviceRuntime> MakeEmulatedRuntime(
    const EmulatedOptions& options) {
  return std::make_unique<EmulatedRuntime>(options);
}

}  // namespace optstate::accelerator
