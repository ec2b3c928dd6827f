#ifndef OPTSTATE_CLIENT_DLPACK_DEVICE_COPIES_H_
#define OPTSTATE_CLIENT_DLPACK_DEVICE_COPIES_H_

// Tensors on a GPU at a Session, which takes host memory: they are copied, by
// CUDA's driver alone.
//
//   OPTSTATE_ASSIGN_OR_RETURN(const auto copies, DeviceCopies::Open());
//   std::vector<std::byte> buffer;  // for the next step, too
//   OPTSTATE_ASSIGN_OR_RETURN(
//       const ForeignTensor host,
//       copies.ToHost(DescribeTensor(*tensor), &buffer));
//   const auto gradient = GradientOf(session->layout(), 3, host);
//
// The caller has asked the tensor's library for it with kStream, so that the
// library has the copies come after what it has given the device, or has waited
// for the device.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/dlpack/foreign_tensor.h"

namespace optstate::client {

// The functions of libcuda.so.1 that copies need, with the types of cuda.h.
struct CopyDriver {
  int (*init)(unsigned int flags) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*primary_context_retain)(void** context, int device) = nullptr;
  int (*primary_context_release)(int device) = nullptr;
  int (*context_push)(void* context) = nullptr;
  int (*context_pop)(void** context) = nullptr;
  int (*stream_synchronize)(void* stream) = nullptr;
  int (*copy_to_host)(void* to, uint64_t from, size_t bytes) = nullptr;
  int (*copy_to_device)(uint64_t to, const void* from, size_t bytes) = nullptr;
  int (*error_name)(int error, const char** name) = nullptr;
};

// Threads: thread-safe; not for one buffer or tensor at the same time.
class DeviceCopies {
 public:
  // The legacy default stream, as DLPack numbers it: that of the copies.
  static constexpr uint64_t kStream = 1;

  // NOT_FOUND: this machine has no driver; UNIMPLEMENTED: it is too old.
  static absl::StatusOr<DeviceCopies> Open();
  explicit DeviceCopies(const CopyDriver& driver) : driver_(driver) {}

  // Returns the tensor as it is in host memory, with its values in the buffer,
  // which becomes large enough. A tensor in host memory is returned as it is.
  // Waits for the copy. INVALID_ARGUMENT: it is not contiguous, or has no
  // memory; UNIMPLEMENTED: another kind of device has it; INTERNAL: the device
  // failed.
  absl::StatusOr<ForeignTensor> ToHost(const ForeignTensor& tensor,
                                       std::vector<std::byte>* buffer) const;
  // Returns likewise a place in host memory for values that ToDevice() copies.
  absl::StatusOr<ForeignTensor> PlaceOnHost(
      const ForeignTensor& tensor, std::vector<std::byte>* buffer) const;
  // Copies what PlaceOnHost() returned for the tensor to it, and waits.
  absl::Status ToDevice(const ForeignTensor& host,
                        const ForeignTensor& tensor) const;

 private:
  class Context;

  absl::Status Check(int result, const char* call) const;

  CopyDriver driver_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_DLPACK_DEVICE_COPIES_H_
