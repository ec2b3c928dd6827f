#include "client/dlpack/device_copies.h"

#include "absl/strings/str_cat.h"
#include "client/collective/nccl/shared_object.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// Numbers of DLPack.
constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;
constexpr int32_t kCudaHost = 3;
constexpr int32_t kRocmHost = 11;
constexpr int32_t kCudaManaged = 13;

bool IsOnHost(const ForeignTensor& tensor) {
  return tensor.device_type == kCpu || tensor.device_type == kCudaHost ||
         tensor.device_type == kRocmHost;
}

absl::Status Wrong(const ForeignTensor& tensor, absl::string_view text) {
  return absl::InvalidArgumentError(
      absl::StrCat("the tensor on device ", tensor.device_id, " ", text));
}

// Returns the bytes of a contiguous tensor.
absl::StatusOr<uint64_t> BytesOf(const ForeignTensor& tensor) {
  if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr)) {
    return Wrong(tensor, absl::StrCat("has ", tensor.ndim,
                                      " dimensions, and no shape of these"));
  }
  int64_t wanted = 1;
  bool is_contiguous = true;
  for (int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] < 0) return Wrong(tensor, "has a negative dimension");
    if (tensor.strides != nullptr && tensor.shape[i] != 1) {
      is_contiguous &= tensor.strides[i] == wanted;
    }
    if (__builtin_mul_overflow(wanted, tensor.shape[i], &wanted)) {
      return Wrong(tensor, "has more elements than can be");
    }
  }
  if (wanted != 0 && !is_contiguous) {
    return Wrong(tensor, "is not contiguous: give a contiguous copy");
  }
  if (wanted != 0 && tensor.data == nullptr) {
    return Wrong(tensor, "has no memory");
  }
  const uint64_t element_bytes =
      uint64_t{tensor.dtype_bits} * tensor.dtype_lanes / 8;
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(wanted), element_bytes,
                             &bytes)) {
    return Wrong(tensor, "has more bytes than can be");
  }
  return bytes;
}

uint64_t AddressOf(const ForeignTensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
}

}  // namespace

// The device's primary context, which libraries share, while this thread
// copies.
class DeviceCopies::Context {
 public:
  explicit Context(const DeviceCopies* copies) : copies_(*copies) {}
  ~Context() {
    void* popped = nullptr;
    if (is_pushed_) copies_.driver_.context_pop(&popped);
    if (is_retained_) copies_.driver_.primary_context_release(device_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  absl::Status Enter(int ordinal) {
    const CopyDriver& driver = copies_.driver_;
    void* context = nullptr;
    OPTSTATE_RETURN_IF_ERROR(copies_.Check(driver.init(0), "cuInit"));
    OPTSTATE_RETURN_IF_ERROR(
        copies_.Check(driver.device_get(&device_, ordinal), "cuDeviceGet"));
    OPTSTATE_RETURN_IF_ERROR(
        copies_.Check(driver.primary_context_retain(&context, device_),
                      "cuDevicePrimaryCtxRetain"));
    is_retained_ = true;
    OPTSTATE_RETURN_IF_ERROR(
        copies_.Check(driver.context_push(context), "cuCtxPushCurrent"));
    is_pushed_ = true;
    return absl::OkStatus();
  }

 private:
  const DeviceCopies& copies_;
  int device_ = 0;
  bool is_retained_ = false;
  bool is_pushed_ = false;
};

absl::StatusOr<DeviceCopies> DeviceCopies::Open() {
  const absl::StatusOr<SharedObject> object =
      SharedObject::Open("libcuda.so.1");
  if (!object.ok()) {
    return Annotate(object.status(), "this machine has no CUDA driver");
  }
  CopyDriver driver;
  const auto find = [&](const char* name, auto* function) {
    return object->Find(name, function);
  };
  OPTSTATE_RETURN_IF_ERROR(find("cuInit", &driver.init));
  OPTSTATE_RETURN_IF_ERROR(find("cuDeviceGet", &driver.device_get));
  OPTSTATE_RETURN_IF_ERROR(
      find("cuDevicePrimaryCtxRetain", &driver.primary_context_retain));
  OPTSTATE_RETURN_IF_ERROR(
      find("cuDevicePrimaryCtxRelease_v2", &driver.primary_context_release));
  OPTSTATE_RETURN_IF_ERROR(find("cuCtxPushCurrent_v2", &driver.context_push));
  OPTSTATE_RETURN_IF_ERROR(find("cuCtxPopCurrent_v2", &driver.context_pop));
  OPTSTATE_RETURN_IF_ERROR(
      find("cuStreamSynchronize", &driver.stream_synchronize));
  OPTSTATE_RETURN_IF_ERROR(find("cuMemcpyDtoH_v2", &driver.copy_to_host));
  OPTSTATE_RETURN_IF_ERROR(find("cuMemcpyHtoD_v2", &driver.copy_to_device));
  OPTSTATE_RETURN_IF_ERROR(find("cuGetErrorName", &driver.error_name));
  return DeviceCopies(driver);
}

absl::Status DeviceCopies::Check(int result, const char* call) const {
  if (result == 0) return absl::OkStatus();
  const char* name = nullptr;
  if (driver_.error_name(result, &name) != 0) name = nullptr;
  return absl::InternalError(absl::StrCat(
      call, ": ", name == nullptr ? "unknown error" : name, " [", result, "]"));
}

absl::StatusOr<ForeignTensor> DeviceCopies::PlaceOnHost(
    const ForeignTensor& tensor, std::vector<std::byte>* buffer) const {
  if (IsOnHost(tensor)) return tensor;
  if (tensor.device_type != kCuda && tensor.device_type != kCudaManaged) {
    return absl::UnimplementedError(absl::StrCat(
        "the tensor is on device ", tensor.device_id, " of DLPack's type ",
        tensor.device_type, ": only those of CUDA are copied here"));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t bytes, BytesOf(tensor));
  if (buffer->size() < bytes) buffer->resize(bytes);
  ForeignTensor host = tensor;
  host.device_type = kCpu;
  host.device_id = 0;
  host.byte_offset = 0;
  host.data = bytes == 0 ? nullptr : buffer->data();
  return host;
}

absl::StatusOr<ForeignTensor> DeviceCopies::ToHost(
    const ForeignTensor& tensor, std::vector<std::byte>* buffer) const {
  OPTSTATE_ASSIGN_OR_RETURN(const ForeignTensor host,
                            PlaceOnHost(tensor, buffer));
  if (IsOnHost(tensor) || host.data == nullptr) return host;
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t bytes, BytesOf(tensor));
  Context context(this);
  OPTSTATE_RETURN_IF_ERROR(context.Enter(tensor.device_id));
  OPTSTATE_RETURN_IF_ERROR(
      Check(driver_.copy_to_host(host.data, AddressOf(tensor), bytes),
            "cuMemcpyDtoH"));
  return host;
}

absl::Status DeviceCopies::ToDevice(const ForeignTensor& host,
                                    const ForeignTensor& tensor) const {
  if (IsOnHost(tensor) || host.data == nullptr) return absl::OkStatus();
  if (tensor.is_read_only) return Wrong(tensor, "is read-only");
  if (tensor.is_copy) {
    return Wrong(tensor, "is a copy: values would be lost with it");
  }
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t bytes, BytesOf(tensor));
  Context context(this);
  OPTSTATE_RETURN_IF_ERROR(context.Enter(tensor.device_id));
  OPTSTATE_RETURN_IF_ERROR(
      Check(driver_.copy_to_device(AddressOf(tensor), host.data, bytes),
            "cuMemcpyHtoD"));
  // From pageable memory the last part may still be on its way.
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  void* const stream = reinterpret_cast<void*>(kStream);
  return Check(driver_.stream_synchronize(stream), "cuStreamSynchronize");
}

}  // namespace optstate::client
