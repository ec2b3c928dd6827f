#include "server/session/devices/job_devices.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/config/device_setting.h"
#include "storage/accelerator/cuda_runtime.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::session {

absl::StatusOr<accelerator::DeviceRuntime*> JobDevices::Runtime() {
  kernels_ = scheduler::EmulatedKernels();
  if (emulated_ != nullptr) return emulated_;
  OPTSTATE_ASSIGN_OR_RETURN(const config::DeviceSetting setting,
                            config::ParseDeviceSetting(setting_));
  switch (setting.kind) {
    case config::DeviceKind::kNone:
      return absl::FailedPreconditionError(
          "this daemon has no devices: start optstated with --devices, or set "
          "`devices` in its configuration");
    case config::DeviceKind::kEmulated:
      runtime_ =
          accelerator::MakeEmulatedRuntime({.devices = setting.emulated});
      break;
    case config::DeviceKind::kCuda:
      runtime_ = accelerator::MakeCudaRuntime();
      kernels_ = scheduler::CudaKernels();
      break;
  }
  return runtime_.get();
}

absl::Status JobDevices::Open() {
  if (!opened_.empty()) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(accelerator::DeviceRuntime* const runtime,
                            Runtime());
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<accelerator::DeviceInfo> infos,
                            runtime->Devices());
  if (infos.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon's setting devices=", setting_,
                     " finds none on this machine"));
  }
  std::vector<std::unique_ptr<accelerator::Device>> devices;
  for (size_t i = 0; i < infos.size(); ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<accelerator::Device> device,
                              runtime->Open(i));
    devices.push_back(std::move(device));
  }
  devices_ = std::move(devices);
  for (const auto& device : devices_) opened_.push_back(device.get());
  return absl::OkStatus();
}

}  // namespace optstate::session
