#ifndef OPTSTATE_SERVER_SESSION_DEVICES_JOB_DEVICES_H_
#define OPTSTATE_SERVER_SESSION_DEVICES_JOB_DEVICES_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/scheduler/executors/device_kernels.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::session {

// The devices that may update a part of a job's elements: all of those that the
// configuration names.
//
// Threads: not thread-safe; the job's lock guards it.
class JobDevices {
 public:
  // `setting` is DaemonConfig.devices. `runtime` makes emulated devices in
  // place of those that are named, and outlives this; null: the named ones.
  explicit JobDevices(std::string setting,
                      accelerator::DeviceRuntime* runtime = nullptr)
      : setting_(std::move(setting)), emulated_(runtime) {}

  // Opens the devices, unless they are open. FAILED_PRECONDITION: there is
  // none, with what to do; other errors are those of the runtime.
  absl::Status Open();
  // Returns the open devices.
  absl::Span<accelerator::Device* const> devices() const { return opened_; }
  // Returns their kernels, once they are open.
  const scheduler::DeviceKernels* kernels() const { return kernels_; }

 private:
  absl::StatusOr<accelerator::DeviceRuntime*> Runtime();

  const std::string setting_;
  accelerator::DeviceRuntime* const emulated_;
  std::unique_ptr<accelerator::DeviceRuntime> runtime_;
  const scheduler::DeviceKernels* kernels_ = nullptr;
  std::vector<std::unique_ptr<accelerator::Device>> devices_;
  std::vector<accelerator::Device*> opened_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DEVICES_JOB_DEVICES_H_
