#include "client/collective/nccl/cuda_queue.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/collective/nccl/shared_object.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// The driver's interface, with the names and values of cuda.h.
using CuResult = int;
constexpr CuResult kCudaSuccess = 0;
constexpr CuResult kCudaErrorNotReady = 600;
constexpr int kPointerAttributeDevicePointer = 3;
using DevicePointer = uint64_t;
static_assert(sizeof(DevicePointer) == sizeof(void*));
using Context = void*;
using Stream = void*;

constexpr size_t kScratchBytes = 16;

struct Driver {
  CuResult (*Init)(unsigned int flags);
  CuResult (*DeviceGet)(int* device, int ordinal);
  CuResult (*DevicePrimaryCtxRetain)(Context* context, int device);
  CuResult (*DevicePrimaryCtxRelease)(int device);
  CuResult (*CtxPushCurrent)(Context context);
  CuResult (*CtxPopCurrent)(Context* context);
  CuResult (*StreamQuery)(Stream stream);
  CuResult (*MemAlloc)(DevicePointer* pointer, size_t bytes);
  CuResult (*MemFree)(DevicePointer pointer);
  CuResult (*PointerGetAttribute)(void* value, int attribute,
                                  DevicePointer pointer);
  CuResult (*GetErrorName)(CuResult result, const char** name);
};

absl::StatusOr<Driver> OpenDriver() {
  const absl::StatusOr<SharedObject> object =
      SharedObject::Open("libcuda.so.1");
  if (!object.ok()) {
    return Annotate(object.status(), "this machine has no CUDA driver");
  }
  Driver driver = {};
  OPTSTATE_RETURN_IF_ERROR(object->Find("cuInit", &driver.Init));
  OPTSTATE_RETURN_IF_ERROR(object->Find("cuDeviceGet", &driver.DeviceGet));
  OPTSTATE_RETURN_IF_ERROR(
      object->Find("cuDevicePrimaryCtxRetain", &driver.DevicePrimaryCtxRetain));
  OPTSTATE_RETURN_IF_ERROR(object->Find("cuDevicePrimaryCtxRelease_v2",
                                        &driver.DevicePrimaryCtxRelease));
  OPTSTATE_RETURN_IF_ERROR(
      object->Find("cuCtxPushCurrent_v2", &driver.CtxPushCurrent));
  OPTSTATE_RETURN_IF_ERROR(
      object->Find("cuCtxPopCurrent_v2", &driver.CtxPopCurrent));
  OPTSTATE_RETURN_IF_ERROR(object->Find("cuStreamQuery", &driver.StreamQuery));
  OPTSTATE_RETURN_IF_ERROR(object->Find("cuMemAlloc_v2", &driver.MemAlloc));
  OPTSTATE_RETURN_IF_ERROR(object->Find("cuMemFree_v2", &driver.MemFree));
  OPTSTATE_RETURN_IF_ERROR(
      object->Find("cuPointerGetAttribute", &driver.PointerGetAttribute));
  OPTSTATE_RETURN_IF_ERROR(
      object->Find("cuGetErrorName", &driver.GetErrorName));
  return driver;
}

absl::Status ToStatus(const Driver& driver, CuResult result,
                      absl::string_view call) {
  if (result == kCudaSuccess) return absl::OkStatus();
  const char* name = nullptr;
  if (driver.GetErrorName(result, &name) != kCudaSuccess) name = nullptr;
  return absl::InternalError(absl::StrCat(
      call, ": ", name == nullptr ? "unknown error" : name, " [", result, "]"));
}

class CudaQueue final : public DeviceQueue {
 public:
  CudaQueue(const Driver& driver, int device, Context context, void* stream)
      : driver_(driver), device_(device), context_(context), stream_(stream) {}

  ~CudaQueue() override {
    if (scratch_ != 0) {
      WithDevice([&] {
        return ToStatus(driver_, driver_.MemFree(scratch_), "cuMemFree");
      }).IgnoreError();
    }
    driver_.DevicePrimaryCtxRelease(device_);
  }

  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  absl::Status Allocate() {
    return WithDevice([&] {
      return ToStatus(driver_, driver_.MemAlloc(&scratch_, kScratchBytes),
                      "cuMemAlloc");
    });
  }

  absl::Status WithDevice(absl::FunctionRef<absl::Status()> what) override {
    OPTSTATE_RETURN_IF_ERROR(ToStatus(driver_, driver_.CtxPushCurrent(context_),
                                      "cuCtxPushCurrent"));
    absl::Status status = what();
    Context popped = nullptr;
    const absl::Status restored =
        ToStatus(driver_, driver_.CtxPopCurrent(&popped), "cuCtxPopCurrent");
    return status.ok() ? restored : status;
  }

  void* stream() const override { return stream_; }
  void* scratch() const override { return reinterpret_cast<void*>(scratch_); }

  absl::Status CheckMemory(const void* address) const override {
    DevicePointer there = 0;
    const CuResult result =
        driver_.PointerGetAttribute(&there, kPointerAttributeDevicePointer,
                                    reinterpret_cast<DevicePointer>(address));
    if (result == kCudaSuccess &&
        there == reinterpret_cast<DevicePointer>(address)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "the CUDA device ", device_, " does not reach the memory at 0x",
        absl::Hex(reinterpret_cast<uintptr_t>(address)),
        ": NCCL takes memory of the device, and host memory that is registered "
        "with it (cudaHostRegister) at the same address. For other host memory "
        "use the tcp collective"));
  }

  absl::StatusOr<bool> IsDone() override {
    const CuResult result = driver_.StreamQuery(stream_);
    if (result == kCudaErrorNotReady) return false;
    OPTSTATE_RETURN_IF_ERROR(ToStatus(driver_, result, "cuStreamQuery"));
    return true;
  }

 private:
  const Driver driver_;
  const int device_;
  const Context context_;
  void* const stream_;
  DevicePointer scratch_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceQueue>> MakeCudaQueue(int device,
                                                           void* stream) {
  OPTSTATE_ASSIGN_OR_RETURN(const Driver driver, OpenDriver());
  OPTSTATE_RETURN_IF_ERROR(ToStatus(driver, driver.Init(0), "cuInit"));
  int handle = 0;
  if (driver.DeviceGet(&handle, device) != kCudaSuccess) {
    return absl::NotFoundError(
        absl::StrCat("this process has no CUDA device ", device));
  }
  Context context = nullptr;
  OPTSTATE_RETURN_IF_ERROR(
      ToStatus(driver, driver.DevicePrimaryCtxRetain(&context, handle),
               "cuDevicePrimaryCtxRetain"));
  auto queue = std::make_unique<CudaQueue>(driver, handle, context, stream);
  OPTSTATE_RETURN_IF_ERROR(queue->Allocate());
  return std::unique_ptr<DeviceQueue>(std::move(queue));
}

}  // namespace optstate::client
