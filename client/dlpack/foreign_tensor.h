#ifndef OPTSTATE_CLIENT_DLPACK_FOREIGN_TENSOR_H_
#define OPTSTATE_CLIENT_DLPACK_FOREIGN_TENSOR_H_

// Tensors of other libraries at a Session, by DLPack: their memory is checked,
// and read and written where it is.
//
//   const DLManagedTensor* tensor = ...;  // of any library
//   const auto gradient =
//       GradientOf(session->layout(), 3, DescribeTensor(*tensor));
//   if (!gradient.ok()) return gradient.status();
//   session->PushGradients(step, 0, {3}, {*gradient});
//
// DLPack's header is not needed here: DescribeTensor() reads the caller's
// structs by the names of their fields, which have been the same since DLPack
// 0.5. The caller keeps the tensor, and calls its deleter.

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"

namespace optstate::client {

// The content of a DLTensor, and what DLPack 1 says beside it.
struct ForeignTensor {
  void* data = nullptr;
  uint64_t byte_offset = 0;
  int32_t device_type = 0;
  int32_t device_id = 0;
  uint8_t dtype_code = 0;
  uint8_t dtype_bits = 0;
  uint16_t dtype_lanes = 0;
  int32_t ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // elements; null: one after the other
  uint32_t major_version = 0;        // 0: of a struct without a version
  bool is_read_only = false;
  bool is_copy = false;  // what is written to it is lost with it
};

// Describes a DLTensor, DLManagedTensor or DLManagedTensorVersioned, however
// the caller has declared it.
template <class Tensor>
ForeignTensor DescribeTensor(const Tensor& tensor) {
  if constexpr (requires { tensor.dl_tensor; }) {
    ForeignTensor described = DescribeTensor(tensor.dl_tensor);
    if constexpr (requires { tensor.version.major; }) {
      described.major_version = tensor.version.major;
      // DLPACK_FLAG_BITMASK_READ_ONLY, DLPACK_FLAG_BITMASK_IS_COPIED.
      described.is_read_only = (tensor.flags & 1) != 0;
      described.is_copy = (tensor.flags & 2) != 0;
    }
    return described;
  } else {
    return {.data = tensor.data,
            .byte_offset = tensor.byte_offset,
            .device_type = static_cast<int32_t>(tensor.device.device_type),
            .device_id = static_cast<int32_t>(tensor.device.device_id),
            .dtype_code = static_cast<uint8_t>(tensor.dtype.code),
            .dtype_bits = static_cast<uint8_t>(tensor.dtype.bits),
            .dtype_lanes = static_cast<uint16_t>(tensor.dtype.lanes),
            .ndim = static_cast<int32_t>(tensor.ndim),
            .shape = tensor.shape,
            .strides = tensor.strides};
  }
}

// The functions below return the memory of a tensor that is whole, contiguous
// and in host memory (pinned for a device or not). INVALID_ARGUMENT says what
// of shape, dtype, strides, alignment or flags does not fit the parameter;
// UNIMPLEMENTED: a device has the tensor, or it is of a later DLPack;
// OUT_OF_RANGE: there is no such parameter.

// Returns the address for Session::PushGradients: of the parameter's gradient
// dtype. Null when it has no elements.
absl::StatusOr<const void*> GradientOf(const Layout& layout, uint32_t parameter,
                                       const ForeignTensor& tensor);

// Returns the address for ParameterTargets::destinations: of the parameter's
// dtype, and to be written.
absl::StatusOr<void*> PlaceFor(const Layout& layout, uint32_t parameter,
                               const ForeignTensor& tensor);

// The values of a parameter, for Session::Load of StateArray::kMaster.
struct ForeignValues {
  DType dtype = DType::kFloat32;
  absl::Span<const std::byte> data;
};
// Returns values of any dtype that parameters can have: masters are made of
// them.
absl::StatusOr<ForeignValues> ValuesOf(const Layout& layout, uint32_t parameter,
                                       const ForeignTensor& tensor);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_DLPACK_FOREIGN_TENSOR_H_
