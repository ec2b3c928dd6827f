#include "storage/accelerator/cuda_runtime.h"

#ifndef OPTSTATE_HAS_CUDA

#include <vector>

namespace optstate::accelerator {
namespace {

absl::Status NoDeviceCode() {
  return absl::FailedPreconditionError(
      "this build has no device code: build it where there is a CUDA Toolkit "
      "(CUDA_HOME or /usr/local/cuda), and not with --//:cuda=off");
}

class NoCudaRuntime final : public DeviceRuntime {
 public:
  absl::StatusOr<std::vector<DeviceInfo>> Devices() override {
    return NoDeviceCode();
  }
  absl::StatusOr<std::unique_ptr<Device>> Open(size_t /*index*/) override {
    return NoDeviceCode();
  }
};

}  // namespace

std::unique_ptr<DeviceRuntime> MakeCudaRuntime() {
  return std::make_unique<NoCudaRuntime>();
}

absl::Status StatusOfCuda(int /*error*/, absl::string_view /*call*/) {
  return NoDeviceCode();
}

}  // namespace optstate::accelerator

#else

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/types/status_macros.h"
#include "storage/accelerator/cuda_shared_memory.h"
#include "storage/accelerator/cuda_status.h"
#include "storage/accelerator/host_registry.h"

namespace optstate::accelerator {
namespace {

absl::Status Check(cudaError_t error, absl::string_view call) {
  return error == cudaSuccess ? absl::OkStatus() : StatusOfCuda(error, call);
}

// Returns the UUID as 8-4-4-4-12 digits, as torch and nvidia-smi show it.
std::string NameOf(const cudaUUID_t& uuid) {
  const std::string digits =
      absl::BytesToHexString(absl::string_view(uuid.bytes, sizeof(uuid.bytes)));
  const absl::string_view id = digits;
  return absl::StrCat(id.substr(0, 8), "-", id.substr(8, 4), "-",
                      id.substr(12, 4), "-", id.substr(16, 4), "-",
                      id.substr(20));
}

class CudaEvent final : public DeviceEvent {
 public:
  CudaEvent(int device, cudaEvent_t event) : device_(device), event_(event) {}
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  ~CudaEvent() override {
    cudaSetDevice(device_);
    cudaEventDestroy(event_);
  }

  absl::Status Wait() override {
    return Check(cudaEventSynchronize(event_), "cudaEventSynchronize");
  }
  absl::StatusOr<bool> IsOver() override {
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) return false;
    OPTSTATE_RETURN_IF_ERROR(Check(error, "cudaEventQuery"));
    return true;
  }
  absl::StatusOr<int64_t> NanosSince(DeviceEvent* earlier) override {
    float ms = 0;
    OPTSTATE_RETURN_IF_ERROR(
        Check(cudaEventElapsedTime(
                  &ms, static_cast<CudaEvent*>(earlier)->event(), event_),
              "cudaEventElapsedTime"));
    constexpr double kNsPerMs = 1e6;
    return static_cast<int64_t>(static_cast<double>(ms) * kNsPerMs);
  }
  cudaEvent_t event() const { return event_; }

 private:
  const int device_;
  const cudaEvent_t event_;
};

class CudaStream final : public DeviceStream {
 public:
  CudaStream(int device, const HostRegistry* host, cudaStream_t stream)
      : device_(device), host_(*host), stream_(stream) {}
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  ~CudaStream() override {
    cudaSetDevice(device_);
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  absl::Status CopyToDevice(DeviceAddress to, const void* from,
                            size_t bytes) override {
    OPTSTATE_RETURN_IF_ERROR(host_.Check(from, bytes));
    return Check(cudaMemcpyAsync(to.ForKernel<void>(), from, bytes,
                                 cudaMemcpyHostToDevice, stream_),
                 "cudaMemcpyAsync to the device");
  }
  absl::Status CopyToHost(void* to, DeviceAddress from, size_t bytes) override {
    OPTSTATE_RETURN_IF_ERROR(host_.Check(to, bytes));
    return Check(cudaMemcpyAsync(to, from.ForKernel<const void>(), bytes,
                                 cudaMemcpyDeviceToHost, stream_),
                 "cudaMemcpyAsync to the host");
  }
  absl::Status CopyOnDevice(DeviceAddress to, DeviceAddress from,
                            size_t bytes) override {
    return Check(
        cudaMemcpyAsync(to.ForKernel<void>(), from.ForKernel<const void>(),
                        bytes, cudaMemcpyDeviceToDevice, stream_),
        "cudaMemcpyAsync on the device");
  }
  absl::Status Record(DeviceEvent* event) override {
    return Check(
        cudaEventRecord(static_cast<CudaEvent*>(event)->event(), stream_),
        "cudaEventRecord");
  }
  absl::Status WaitFor(DeviceEvent* event) override {
    return Check(
        cudaStreamWaitEvent(stream_, static_cast<CudaEvent*>(event)->event(),
                            cudaEventWaitDefault),
        "cudaStreamWaitEvent");
  }
  absl::Status Wait() override {
    return Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  // A launch takes a stream of the calling thread's device alone.
  void* native_handle() override {
    cudaSetDevice(device_);
    return stream_;
  }

 private:
  const int device_;
  const HostRegistry& host_;
  const cudaStream_t stream_;
};

// The registered memory of the process. What is registered is so for all
// devices, and a second registration of it would be an error.
//
// Threads: thread-safe.
class Registrations {
 public:
  static Registrations& OfProcess() {
    static auto* const registrations = new Registrations;
    return *registrations;
  }

  absl::Status Add(absl::Span<std::byte> memory) {
    const absl::MutexLock lock(&mu_);
    const auto it = by_begin_.find(memory.data());
    if (it != by_begin_.end() && it->second.bytes == memory.size()) {
      ++it->second.users;
      return absl::OkStatus();
    }
    OPTSTATE_RETURN_IF_ERROR(
        Check(cudaHostRegister(memory.data(), memory.size(),
                               cudaHostRegisterPortable),
              absl::StrCat("cudaHostRegister of ", memory.size(), " bytes")));
    by_begin_[memory.data()] = {memory.size(), 1};
    return absl::OkStatus();
  }
  void Remove(std::byte* begin) {
    const absl::MutexLock lock(&mu_);
    const auto it = by_begin_.find(begin);
    if (it == by_begin_.end() || --it->second.users > 0) return;
    by_begin_.erase(it);
    cudaHostUnregister(begin);
  }

 private:
  struct Memory {
    size_t bytes = 0;
    int users = 0;  // devices
  };

  absl::Mutex mu_;
  std::map<std::byte*, Memory> by_begin_ ABSL_GUARDED_BY(mu_);
};

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, DeviceInfo info)
      : index_(index),
        info_(std::move(info)),
        name_(NameOf(index, info_)),
        shared_(index) {}

  // Returns its name in errors.
  static std::string NameOf(int index, const DeviceInfo& info) {
    return absl::StrCat("CUDA device ", index, " (", info.name, ")");
  }

  const DeviceInfo& info() const override { return info_; }

  absl::StatusOr<DeviceAddress> Allocate(uint64_t bytes) override {
    OPTSTATE_RETURN_IF_ERROR(Use());
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error != cudaSuccess) {
      return CheckHere(
          error, absl::StrCat("cudaMalloc of ", bytes, " bytes", FreeText()));
    }
    return DeviceAddress{reinterpret_cast<uint64_t>(memory)};
  }
  absl::StatusOr<DeviceAddress> AllocateShareable(uint64_t bytes) override {
    OPTSTATE_RETURN_IF_ERROR(Use());
    absl::StatusOr<DeviceAddress> memory = shared_.Allocate(bytes);
    if (memory.ok()) return memory;
    return Annotate(memory.status(), name_);
  }
  absl::StatusOr<ExportedMemory> Export(DeviceAddress memory) override {
    OPTSTATE_RETURN_IF_ERROR(Use());
    ExportedMemory exported;
    absl::StatusOr<UniqueFd> file = shared_.Export(memory, &exported.bytes);
    if (!file.ok()) return Annotate(file.status(), name_);
    exported.file = *std::move(file);
    exported.device = info_.id;
    return exported;
  }
  absl::StatusOr<DeviceAddress> Import(
      const ExportedMemory& exported) override {
    OPTSTATE_RETURN_IF_ERROR(Use());
    if (exported.device != info_.id) {
      return absl::InvalidArgumentError(absl::StrCat(
          "memory of device ", exported.device, " for device ", info_.id));
    }
    return shared_.Import(exported.file.get(), exported.bytes);
  }
  void Free(DeviceAddress memory) override {
    if (!Use().ok() || shared_.Free(memory)) return;
    cudaFree(memory.ForKernel<void>());
  }

  absl::Status RegisterHost(absl::Span<std::byte> memory) override {
    OPTSTATE_RETURN_IF_ERROR(Use());
    OPTSTATE_RETURN_IF_ERROR(host_.Add(memory));
    absl::Status registered = Registrations::OfProcess().Add(memory);
    if (!registered.ok()) host_.Remove(memory.data());
    return registered;
  }
  void UnregisterHost(std::byte* begin) override {
    // Also of a device that is lost: other memory may come to lie there.
    if (host_.Remove(begin)) {
      Use().IgnoreError();
      Registrations::OfProcess().Remove(begin);
    }
  }

  absl::StatusOr<std::unique_ptr<DeviceStream>> MakeStream() override {
    OPTSTATE_RETURN_IF_ERROR(Use());
    cudaStream_t stream = nullptr;
    OPTSTATE_RETURN_IF_ERROR(
        CheckHere(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                  "cudaStreamCreateWithFlags"));
    return std::make_unique<CudaStream>(index_, &host_, stream);
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> MakeEvent() override {
    return MakeEventWith(cudaEventBlockingSync | cudaEventDisableTiming);
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> MakeTimedEvent() override {
    return MakeEventWith(cudaEventBlockingSync);
  }

 private:
  absl::StatusOr<std::unique_ptr<DeviceEvent>> MakeEventWith(
      unsigned int flags) {
    OPTSTATE_RETURN_IF_ERROR(Use());
    cudaEvent_t event = nullptr;
    OPTSTATE_RETURN_IF_ERROR(CheckHere(cudaEventCreateWithFlags(&event, flags),
                                       "cudaEventCreateWithFlags"));
    return std::make_unique<CudaEvent>(index_, event);
  }
  // Makes it the device of the calling thread, which the functions of streams
  // and events do not ask for.
  absl::Status Use() const {
    return CheckHere(cudaSetDevice(index_), "cudaSetDevice");
  }
  absl::Status CheckHere(cudaError_t error, absl::string_view call) const {
    return Annotate(Check(error, call), name_);
  }
  // Says how much of the device's memory is free; empty: it does not say.
  static std::string FreeText() {
    size_t free_bytes = 0;
    size_t all_bytes = 0;
    if (cudaMemGetInfo(&free_bytes, &all_bytes) != cudaSuccess) return "";
    return absl::StrCat(", ", free_bytes, " of ", all_bytes, " are free");
  }

  const int index_;
  const DeviceInfo info_;
  const std::string name_;
  HostRegistry host_;
  CudaSharedMemory shared_;
};

class CudaRuntime final : public DeviceRuntime {
 public:
  absl::StatusOr<std::vector<DeviceInfo>> Devices() override {
    int count = 0;
    OPTSTATE_RETURN_IF_ERROR(
        Check(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
    std::vector<DeviceInfo> devices;
    for (int i = 0; i < count; ++i) {
      cudaDeviceProp properties;
      OPTSTATE_RETURN_IF_ERROR(
          Check(cudaGetDeviceProperties(&properties, i),
                absl::StrCat("cudaGetDeviceProperties of CUDA device ", i)));
      devices.push_back({properties.name, properties.totalGlobalMem,
                         NameOf(properties.uuid)});
    }
    return devices;
  }
  absl::StatusOr<std::unique_ptr<Device>> Open(size_t index) override {
    OPTSTATE_ASSIGN_OR_RETURN(std::vector<DeviceInfo> devices, Devices());
    if (index >= devices.size()) {
      return absl::NotFoundError(
          absl::StrCat("CUDA device ", index, " of ", devices.size()));
    }
    const auto ordinal = static_cast<int>(index);
    OPTSTATE_RETURN_IF_ERROR(Annotate(
        CheckKernels(ordinal), CudaDevice::NameOf(ordinal, devices[index])));
    return std::make_unique<CudaDevice>(ordinal, std::move(devices[index]));
  }

 private:
  // Refuses a device for which this program has no kernels: its first launch
  // would fail, steps after a job began.
  static absl::Status CheckKernels(int ordinal) {
    int major = 0;
    int minor = 0;
    OPTSTATE_RETURN_IF_ERROR(
        Check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                                     ordinal),
              "cudaDeviceGetAttribute"));
    OPTSTATE_RETURN_IF_ERROR(
        Check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor,
                                     ordinal),
              "cudaDeviceGetAttribute"));
    return CheckArchitecture(major, minor, OPTSTATE_CUDA_ARCHITECTURE_MIN);
  }
};

}  // namespace

std::unique_ptr<DeviceRuntime> MakeCudaRuntime() {
  return std::make_unique<CudaRuntime>();
}

absl::Status StatusOfCuda(int error, absl::string_view call) {
  const auto code = static_cast<cudaError_t>(error);
  CudaSurroundings surroundings = ReadCudaEnvironment();
  cudaDriverGetVersion(&surroundings.driver_version);
  surroundings.runtime_version = CUDART_VERSION;
  // An error that is not sticky is otherwise found by the next call that asks.
  cudaGetLastError();
  return CudaStatus(
      error, call, surroundings,
      absl::StrCat(cudaGetErrorName(code), ", ", cudaGetErrorString(code)));
}

}  // namespace optstate::accelerator

#endif  // OPTSTATE_HAS_CUDA
