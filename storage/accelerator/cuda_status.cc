#include "storage/accelerator/cuda_status.h"

#include <cstdlib>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace optstate::accelerator {
namespace {

using Code = absl::StatusCode;

// Errors whose text depends on the surroundings or on the call.
constexpr int kMemoryAllocation = 2;
constexpr int kInsufficientDriver = 35;
constexpr int kNoDevice = 100;

constexpr char kLook[] =
    "run nvidia-smi, which must list the GPU, and look for NVRM and Xid lines "
    "in dmesg (Xid 79: the GPU has fallen off the bus); reset the GPU "
    "(nvidia-smi --gpu-reset) or the machine";
constexpr char kNewEngine[] =
    "the device is lost for this process, and the CPU does its part of the "
    "updates; run nvidia-smi, look for Xid lines in dmesg (79: the GPU has "
    "fallen off the bus), and reset the GPU (nvidia-smi --gpu-reset) or the "
    "machine if it does not answer; then give the jobs new engines (optctl "
    "upgrade)";
constexpr char kNewDriver[] =
    "install a newer driver, or build optstate with a CUDA Toolkit that is no "
    "newer than the driver";
constexpr char kNoCode[] =
    "hide the device (CUDA_VISIBLE_DEVICES), or build optstate for its "
    "architecture (ARCHITECTURES in deploy/bazel/cuda.bzl)";
constexpr char kStartMps[] =
    "look at the MPS daemon (echo get_server_list | nvidia-cuda-mps-control) "
    "and its logs; it must run as the daemon's user, or as root, with the same "
    "CUDA_MPS_PIPE_DIRECTORY; or stop it (echo quit | nvidia-cuda-mps-control) "
    "to use the GPU without MPS";
constexpr char kLessMps[] =
    "end other processes that use the GPU, or jobs that use devices (optctl "
    "describe device); each job's engine is a client of MPS of its own";
constexpr char kExclusive[] =
    "set its compute mode to DEFAULT (nvidia-smi -c DEFAULT; nvidia-smi -q -d "
    "COMPUTE shows it), or run the trainer and optstated under MPS: each job's "
    "engine has a context of its own beside the trainer's";

// By number.
constexpr CudaError kErrors[] = {
    {1, "cudaErrorInvalidValue", Code::kInvalidArgument,
     "an argument is not what it has to be", "", true},
    {kMemoryAllocation, "cudaErrorMemoryAllocation", Code::kResourceExhausted,
     "the device's memory is used up",
     "give jobs a smaller device_budget (optctl describe device shows what "
     "they "
     "hold there), or end other processes that hold memory there (nvidia-smi)",
     true},
    {3, "cudaErrorInitializationError", Code::kFailedPrecondition,
     "the driver cannot be initialised", kLook, true},
    {34, "cudaErrorStubLibrary", Code::kFailedPrecondition,
     "the libcuda.so.1 that was loaded is a stub of the CUDA Toolkit and no "
     "driver",
     "take the toolkit's folder of stubs out of LD_LIBRARY_PATH"},
    {kInsufficientDriver, "cudaErrorInsufficientDriver",
     Code::kFailedPrecondition, "the driver is too old for this program",
     kNewDriver},
    {36, "cudaErrorCallRequiresNewerDriver", Code::kFailedPrecondition,
     "the driver is too old for this call", kNewDriver},
    {46, "cudaErrorDevicesUnavailable", Code::kFailedPrecondition,
     "the device is busy: it is in exclusive or prohibited compute mode and "
     "another process has it, or it has no room for one more context",
     kExclusive, true},
    {53, "cudaErrorPriorLaunchFailure", Code::kInternal,
     "an earlier launch has failed", kNewEngine},
    {98, "cudaErrorInvalidDeviceFunction", Code::kFailedPrecondition,
     "the program has no kernel for this device", kNoCode},
    {kNoDevice, "cudaErrorNoDevice", Code::kFailedPrecondition,
     "there is no GPU that CUDA can use",
     "nvidia-smi -L must list one, and the daemon's user must be able to open "
     "/dev/nvidia* (systemd: DeviceAllow=char-nvidia* rw; docker: --gpus all); "
     "a GPU in MIG mode needs an instance (nvidia-smi mig -cgi PROFILE -C)"},
    {101, "cudaErrorInvalidDevice", Code::kNotFound,
     "there are not as many devices (any more)", kLook, true},
    {102, "cudaErrorDeviceNotLicensed", Code::kFailedPrecondition,
     "the virtual GPU has no license",
     "have the machine get one (nvidia-gridd)"},
    {127, "cudaErrorStartupFailure", Code::kFailedPrecondition,
     "CUDA cannot be started", kLook},
    {200, "cudaErrorInvalidKernelImage", Code::kFailedPrecondition,
     "the device takes no kernel of this program", kNoCode},
    {201, "cudaErrorDeviceUninitialized", Code::kInternal,
     "the device has no context any more", kNewEngine},
    {209, "cudaErrorNoKernelImageForDevice", Code::kFailedPrecondition,
     "the program has no kernel for this device's architecture", kNoCode},
    {214, "cudaErrorECCUncorrectable", Code::kInternal,
     "the device's memory has an error that cannot be corrected", kNewEngine},
    {216, "cudaErrorDeviceAlreadyInUse", Code::kFailedPrecondition,
     "the device is in exclusive compute mode, and another process has it",
     kExclusive},
    {218, "cudaErrorInvalidPtx", Code::kFailedPrecondition,
     "the driver cannot compile a kernel of this program for the device",
     kNoCode},
    {220, "cudaErrorNvlinkUncorrectable", Code::kInternal,
     "NVLink has had an error that cannot be corrected", kNewEngine},
    {221, "cudaErrorJitCompilerNotFound", Code::kFailedPrecondition,
     "kernels have to be compiled for this device, and the driver's compiler "
     "(libnvidia-ptxjitcompiler.so.1) is not there",
     "install it with the driver, or build optstate for the device's "
     "architecture (ARCHITECTURES in deploy/bazel/cuda.bzl)"},
    {222, "cudaErrorUnsupportedPtxVersion", Code::kFailedPrecondition,
     "kernels have to be compiled for this device, and the driver is too old "
     "for that",
     kNewDriver},
    {223, "cudaErrorJitCompilationDisabled", Code::kFailedPrecondition,
     "kernels have to be compiled for this device, which is turned off",
     "unset CUDA_DISABLE_PTX_JIT, or build optstate for the device's "
     "architecture (ARCHITECTURES in deploy/bazel/cuda.bzl)"},
    {226, "cudaErrorContained", Code::kInternal,
     "the device has contained an error", kNewEngine},
    {303, "cudaErrorSharedObjectInitFailed", Code::kFailedPrecondition,
     "a library of the driver cannot be initialised", kLook},
    {304, "cudaErrorOperatingSystem", Code::kFailedPrecondition,
     "the operating system has refused a call of the driver",
     "the daemon's user must be able to open /dev/nvidia* (systemd: "
     "DeviceAllow=char-nvidia* rw; docker: --gpus all)"},
    {700, "cudaErrorIllegalAddress", Code::kInternal,
     "a kernel has used an address that is not its own", kNewEngine},
    {701, "cudaErrorLaunchOutOfResources", Code::kFailedPrecondition,
     "the device has too little for a launch",
     "look at the limits of MPS, if there are some", true},
    {702, "cudaErrorLaunchTimeout", Code::kInternal,
     "a kernel took longer than the device allows", kNewEngine, true},
    {709, "cudaErrorContextIsDestroyed", Code::kInternal,
     "the device's context is gone", kNewEngine},
    {710, "cudaErrorAssert", Code::kInternal, "an assertion of a kernel failed",
     kNewEngine},
    {712, "cudaErrorHostMemoryAlreadyRegistered", Code::kInvalidArgument,
     "the memory is registered already", ""},
    {713, "cudaErrorHostMemoryNotRegistered", Code::kInvalidArgument,
     "the memory is not registered", ""},
    {714, "cudaErrorHardwareStackError", Code::kInternal,
     "the device's stack is damaged", kNewEngine},
    {715, "cudaErrorIllegalInstruction", Code::kInternal,
     "a kernel had an instruction that the device does not know", kNewEngine},
    {716, "cudaErrorMisalignedAddress", Code::kInternal,
     "a kernel has used an address that is not aligned", kNewEngine},
    {717, "cudaErrorInvalidAddressSpace", Code::kInternal,
     "a kernel has used an address of another space", kNewEngine},
    {718, "cudaErrorInvalidPc", Code::kInternal,
     "a kernel has jumped to where no code is", kNewEngine},
    {719, "cudaErrorLaunchFailure", Code::kInternal,
     "a kernel ended with an error", kNewEngine},
    {721, "cudaErrorTensorMemoryLeak", Code::kInternal,
     "a kernel has kept tensor memory", kNewEngine},
    {800, "cudaErrorNotPermitted", Code::kFailedPrecondition,
     "the call is not permitted",
     "look at the driver's settings and at those of the container"},
    {801, "cudaErrorNotSupported", Code::kUnimplemented,
     "the device or the driver cannot do this", ""},
    {802, "cudaErrorSystemNotReady", Code::kFailedPrecondition,
     "the system is not ready yet for CUDA",
     "on machines with NVSwitch start nvidia-fabricmanager, of the driver's "
     "version"},
    {803, "cudaErrorSystemDriverMismatch", Code::kFailedPrecondition,
     "the kernel's driver and libcuda.so.1 are of different versions",
     "reboot after an update of the driver; in a container take the machine's "
     "libcuda.so.1"},
    {804, "cudaErrorCompatNotSupportedOnDevice", Code::kFailedPrecondition,
     "the compatibility package of CUDA does not work with this device",
     "take its folder out of LD_LIBRARY_PATH, and install a newer driver"},
    {805, "cudaErrorMpsConnectionFailed", Code::kFailedPrecondition,
     "the MPS daemon does not answer", kStartMps, true},
    {806, "cudaErrorMpsRpcFailure", Code::kInternal,
     "the connection to the MPS server has broken", kNewEngine, true},
    {807, "cudaErrorMpsServerNotReady", Code::kUnavailable,
     "the MPS server takes no clients at the moment: it starts, or recovers "
     "from a failure",
     kStartMps, true},
    {808, "cudaErrorMpsMaxClientsReached", Code::kFailedPrecondition,
     "the MPS server has as many clients as it can", kLessMps, true},
    {809, "cudaErrorMpsMaxConnectionsReached", Code::kFailedPrecondition,
     "the MPS server has as many connections to the device as it can", kLessMps,
     true},
    {810, "cudaErrorMpsClientTerminated", Code::kInternal,
     "the MPS server has ended this client", kNewEngine, true},
    {911, "cudaErrorExternalDevice", Code::kInternal,
     "another device that it works with has failed", kNewEngine},
    {999, "cudaErrorUnknown", Code::kInternal,
     "the driver has failed for a reason that it does not know", kNewEngine,
     true},
};

struct Text {
  std::string what;
  std::string advice;
};

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

Text InsufficientDriverText(const CudaSurroundings& surroundings,
                            const CudaError& known) {
  if (surroundings.driver_version == 0) {
    return {"there is no driver of NVIDIA: libcuda.so.1 cannot be loaded",
            "install the driver, with which nvidia-smi works on this machine; "
            "a container gets it from its engine (docker: --gpus all)"};
  }
  if (surroundings.driver_version >= surroundings.runtime_version) {
    return {known.what, known.advice};
  }
  return {absl::StrCat("the driver is for CUDA ",
                       VersionText(surroundings.driver_version),
                       " at most, and this program was built with CUDA ",
                       VersionText(surroundings.runtime_version)),
          known.advice};
}

Text NoDeviceText(const CudaSurroundings& surroundings,
                  const CudaError& known) {
  if (!surroundings.visible_devices.has_value()) {
    return {known.what, known.advice};
  }
  const std::string& visible = *surroundings.visible_devices;
  if (absl::StripAsciiWhitespace(visible).empty()) {
    return {"CUDA_VISIBLE_DEVICES is empty, which hides every GPU",
            "unset it where optstated is started, or name GPUs that nvidia-smi "
            "-L lists"};
  }
  const std::string set =
      absl::StrCat("CUDA_VISIBLE_DEVICES is \"", visible, "\"");
  if (absl::StrContains(visible, "MIG-")) {
    return {absl::StrCat(set, ", and there is no such MIG instance"),
            "take a UUID that nvidia-smi -L lists below a GPU; nvidia-smi mig "
            "-cgi PROFILE -C makes an instance"};
  }
  return {absl::StrCat(set, ", which names no GPU that CUDA can use"),
          "nvidia-smi -L lists numbers and UUIDs; a GPU in MIG mode needs an "
          "instance (nvidia-smi mig -cgi PROFILE -C) and is named by the UUID "
          "of that; under MPS numbers are those of the MPS server, so name "
          "UUIDs"};
}

Text TextOf(const CudaError& known, absl::string_view call,
            const CudaSurroundings& surroundings) {
  switch (known.error) {
    case kMemoryAllocation:
      if (!absl::StartsWith(call, "cudaHostRegister")) break;
      return {"the machine has no memory left that can be pinned",
              "free host memory, or give jobs a smaller device_budget, or "
              "leave offload_fraction out"};
    case kInsufficientDriver:
      return InsufficientDriverText(surroundings, known);
    case kNoDevice:
      return NoDeviceText(surroundings, known);
    default:
      break;
  }
  return {known.what, known.advice};
}

bool IsPercentage(const std::string& text) {
  double value = 0;
  return absl::SimpleAtod(text, &value) && value > 0 && value <= 100;
}

// Returns whether it is like 0=8G,1=512M: a device and a size each.
bool IsMemoryLimit(const std::string& text) {
  const std::vector<std::string> limits = absl::StrSplit(text, ',');
  return absl::c_all_of(limits, [](const std::string& limit) {
    const std::vector<std::string> parts = absl::StrSplit(limit, '=');
    return parts.size() == 2 && !parts[0].empty() && !parts[1].empty() &&
           absl::ascii_isdigit(static_cast<unsigned char>(parts[1][0]));
  });
}

// Names the limits of MPS that this process has; empty: none.
std::string MpsText(const CudaSurroundings& surroundings) {
  std::vector<std::string> set;
  if (const auto& directory = surroundings.mps_pipe_directory) {
    set.push_back(absl::StrCat("CUDA_MPS_PIPE_DIRECTORY=", *directory));
  }
  if (const auto& percentage = surroundings.mps_thread_percentage) {
    set.push_back(
        absl::StrCat("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=", *percentage,
                     IsPercentage(*percentage)
                         ? ""
                         : " (which is no number above 0 and up to 100)"));
  }
  if (const auto& limit = surroundings.mps_memory_limit) {
    set.push_back(absl::StrCat(
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=", *limit,
        IsMemoryLimit(*limit) ? ""
                              : " (which is not DEVICE=SIZE, as in 0=8G)"));
  }
  if (set.empty()) return "";
  return absl::StrCat("; this process has ", absl::StrJoin(set, ", "),
                      " from the environment that optstated was started in");
}

std::optional<std::string> Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace

CudaSurroundings ReadCudaEnvironment() {
  CudaSurroundings surroundings;
  surroundings.visible_devices = Variable("CUDA_VISIBLE_DEVICES");
  surroundings.mps_pipe_directory = Variable("CUDA_MPS_PIPE_DIRECTORY");
  surroundings.mps_thread_percentage =
      Variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
  surroundings.mps_memory_limit = Variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
  return surroundings;
}

absl::Span<const CudaError> CudaErrors() { return kErrors; }

absl::Status CudaStatus(int error, absl::string_view call,
                        const CudaSurroundings& surroundings,
                        absl::string_view cuda_text) {
  if (error == 0) return absl::OkStatus();
  const auto known = absl::c_find_if(
      kErrors, [error](const CudaError& each) { return each.error == error; });
  if (known == std::end(kErrors)) {
    return absl::UnavailableError(
        absl::StrCat(call, ": error ", error, " of CUDA",
                     cuda_text.empty() ? "" : ", ", cuda_text));
  }
  const Text text = TextOf(*known, call, surroundings);
  return absl::Status(
      known->code,
      absl::StrCat(call, ": ", known->name, ", ", text.what,
                   text.advice.empty() ? "" : "; ", text.advice,
                   known->may_be_mps ? MpsText(surroundings) : ""));
}

absl::Status CheckArchitecture(int major, int minor, int least) {
  if (10 * major + minor >= least) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("its compute capability is ", major, ".", minor,
                   ", and this program has kernels for ", least / 10, ".",
                   least % 10, " and later; ", kNoCode));
}

}  // namespace optstate::accelerator
