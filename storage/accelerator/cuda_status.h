#ifndef OPTSTATE_STORAGE_ACCELERATOR_CUDA_STATUS_H_
#define OPTSTATE_STORAGE_ACCELERATOR_CUDA_STATUS_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

// The texts of CUDA's errors: what was wrong, where, and what to do. Nothing
// here needs CUDA, so that builds without it test every text.
namespace optstate::accelerator {

// The surroundings of a process that uses CUDA, as far as an error's text needs
// them.
struct CudaSurroundings {
  // Versions as CUDA counts them: 12040 is CUDA 12.4.
  int driver_version = 0;  // the newest that the driver has; 0: no driver
  int runtime_version = 0;
  // Variables of the environment, where they are set: CUDA_VISIBLE_DEVICES,
  // CUDA_MPS_PIPE_DIRECTORY, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE and
  // CUDA_MPS_PINNED_DEVICE_MEM_LIMIT.
  std::optional<std::string> visible_devices;
  std::optional<std::string> mps_pipe_directory;
  std::optional<std::string> mps_thread_percentage;
  std::optional<std::string> mps_memory_limit;
};

// Returns the variables of this process. The versions stay 0.
CudaSurroundings ReadCudaEnvironment();

// One error of CUDA's run time, a cudaError_t.
struct CudaError {
  int error = 0;
  const char* name = "";  // CUDA's
  absl::StatusCode code = absl::StatusCode::kOk;
  const char* what = "";
  const char* advice = "";
  // The limits of MPS may be the cause, and are named then.
  bool may_be_mps = false;
};

// Returns the errors that have a text here, by number.
absl::Span<const CudaError> CudaErrors();

// Returns the error of device_runtime.h for a cudaError_t that a call has
// returned; OK for 0. FAILED_PRECONDITION: the node has to be mended first.
// `cuda_text`: CUDA's own words, for errors that have no text here; those are
// UNAVAILABLE.
absl::Status CudaStatus(int error, absl::string_view call,
                        const CudaSurroundings& surroundings,
                        absl::string_view cuda_text);

// Refuses a device of compute capability `major`.`minor` when the oldest that
// this build has kernels for is `least`, as nvcc counts: 80 is 8.0.
absl::Status CheckArchitecture(int major, int minor, int least);

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_CUDA_STATUS_H_
