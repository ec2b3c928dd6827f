#ifndef OPTSTATE_STORAGE_ACCELERATOR_CUDA_RUNTIME_H_
#define OPTSTATE_STORAGE_ACCELERATOR_CUDA_RUNTIME_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::accelerator {

// Makes a runtime of CUDA's devices. The driver is looked for when a function
// is called; without one, or in a build without device code, each fails with
// FAILED_PRECONDITION and the reason.
//
// A process may fork before its first call, not after it.
std::unique_ptr<DeviceRuntime> MakeCudaRuntime();

// Returns the error of device_runtime.h for a cudaError_t of a call that is
// named.
absl::Status StatusOfCuda(int error, absl::string_view call);

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_CUDA_RUNTIME_H_
