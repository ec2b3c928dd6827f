#include "client/dlpack/foreign_tensor.h"

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// Numbers of DLPack: of devices whose memory is the host's, and of kinds of
// numbers.
constexpr int32_t kCpu = 1;
constexpr int32_t kCudaHost = 3;
constexpr int32_t kRocmHost = 11;
constexpr uint8_t kFloat = 2;
constexpr uint8_t kBfloat = 4;
constexpr uint32_t kMajorVersionMax = 1;

// A tensor that was checked, but for its dtype.
struct HostMemory {
  std::byte* data = nullptr;
  std::optional<DType> dtype;  // nothing: no parameter can have it
};

absl::Status Wrong(const ParameterSpec& spec, absl::string_view text) {
  return absl::InvalidArgumentError(
      absl::StrCat("the tensor for \"", spec.name, "\" ", text));
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("(", absl::StrJoin(shape, ", "), ")");
}

std::optional<DType> DTypeOf(const ForeignTensor& tensor) {
  if (tensor.dtype_lanes != 1) return std::nullopt;
  if (tensor.dtype_code == kFloat && tensor.dtype_bits == 32) {
    return DType::kFloat32;
  }
  if (tensor.dtype_code == kFloat && tensor.dtype_bits == 16) {
    return DType::kFloat16;
  }
  if (tensor.dtype_code == kBfloat && tensor.dtype_bits == 16) {
    return DType::kBFloat16;
  }
  return std::nullopt;
}

std::string DTypeText(const ForeignTensor& tensor) {
  const std::optional<DType> dtype = DTypeOf(tensor);
  if (dtype.has_value()) return std::string(Name(*dtype));
  return absl::StrCat("of DLPack's dtype code ", uint32_t{tensor.dtype_code},
                      " with ", uint32_t{tensor.dtype_bits}, " bits and ",
                      uint32_t{tensor.dtype_lanes}, " lanes");
}

absl::Status CheckStrides(const ParameterSpec& spec,
                          const ForeignTensor& tensor) {
  if (tensor.strides == nullptr || spec.numel == 0) return absl::OkStatus();
  int64_t wanted = 1;
  for (size_t i = spec.shape.size(); i-- > 0;) {
    if (spec.shape[i] != 1 && tensor.strides[i] != wanted) {
      return Wrong(
          spec, absl::StrCat("is not contiguous (shape ", ShapeText(spec.shape),
                             ", strides ",
                             ShapeText({tensor.strides, spec.shape.size()}),
                             "): give a contiguous copy"));
    }
    wanted *= spec.shape[i];
  }
  return absl::OkStatus();
}

absl::Status CheckShape(const ParameterSpec& spec,
                        const ForeignTensor& tensor) {
  if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr)) {
    return Wrong(spec, absl::StrCat("has ", tensor.ndim,
                                    " dimensions, and no shape of these"));
  }
  const absl::Span<const int64_t> shape(tensor.shape,
                                        static_cast<size_t>(tensor.ndim));
  if (shape == absl::MakeConstSpan(spec.shape)) return absl::OkStatus();
  return Wrong(spec, absl::StrCat("has the shape ", ShapeText(shape), ", not ",
                                  ShapeText(spec.shape)));
}

absl::StatusOr<const ParameterSpec*> SpecOf(const Layout& layout,
                                            uint32_t parameter) {
  const absl::Span<const ParameterSpec> specs = layout.parameters();
  if (parameter < specs.size()) return &specs[parameter];
  return absl::OutOfRangeError(
      absl::StrCat("parameter ", parameter, ": there are ", specs.size()));
}

absl::StatusOr<HostMemory> HostMemoryOf(const ParameterSpec& spec,
                                        const ForeignTensor& tensor) {
  if (tensor.major_version > kMajorVersionMax) {
    return absl::UnimplementedError(
        absl::StrCat("the tensor for \"", spec.name, "\" is of DLPack ",
                     tensor.major_version, ": ask its library for DLPack 1"));
  }
  if (tensor.device_type != kCpu && tensor.device_type != kCudaHost &&
      tensor.device_type != kRocmHost) {
    return absl::UnimplementedError(
        absl::StrCat("the tensor for \"", spec.name, "\" is on device ",
                     tensor.device_id, " of DLPack's type ", tensor.device_type,
                     ": a session takes host memory, so copy it there "
                     "(DeviceCopies does, of GPUs)"));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckShape(spec, tensor));
  OPTSTATE_RETURN_IF_ERROR(CheckStrides(spec, tensor));
  HostMemory memory;
  memory.dtype = DTypeOf(tensor);
  if (spec.numel == 0) return memory;
  if (tensor.data == nullptr) return Wrong(spec, "has no memory");
  memory.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  const auto address = reinterpret_cast<uintptr_t>(memory.data);
  if (memory.dtype.has_value() && address % SizeInBytes(*memory.dtype) != 0) {
    return Wrong(spec, "is not aligned to its elements: give a copy of it");
  }
  return memory;
}

absl::StatusOr<std::byte*> MemoryOf(const ParameterSpec& spec, DType dtype,
                                    const ForeignTensor& tensor) {
  OPTSTATE_ASSIGN_OR_RETURN(const HostMemory memory,
                            HostMemoryOf(spec, tensor));
  if (memory.dtype == dtype) return memory.data;
  return Wrong(spec,
               absl::StrCat("is ", DTypeText(tensor), ", not ", Name(dtype)));
}

}  // namespace

absl::StatusOr<const void*> GradientOf(const Layout& layout, uint32_t parameter,
                                       const ForeignTensor& tensor) {
  OPTSTATE_ASSIGN_OR_RETURN(const ParameterSpec* const spec,
                            SpecOf(layout, parameter));
  OPTSTATE_ASSIGN_OR_RETURN(std::byte* const data,
                            MemoryOf(*spec, spec->gradient_dtype, tensor));
  return static_cast<const void*>(data);
}

absl::StatusOr<void*> PlaceFor(const Layout& layout, uint32_t parameter,
                               const ForeignTensor& tensor) {
  OPTSTATE_ASSIGN_OR_RETURN(const ParameterSpec* const spec,
                            SpecOf(layout, parameter));
  OPTSTATE_ASSIGN_OR_RETURN(std::byte* const data,
                            MemoryOf(*spec, spec->dtype, tensor));
  if (tensor.is_read_only) {
    return Wrong(*spec, "is read-only: values cannot be written to it");
  }
  if (tensor.is_copy) {
    return Wrong(*spec,
                 "is a copy of what it was made of: values would be lost with "
                 "it");
  }
  return static_cast<void*>(data);
}

absl::StatusOr<ForeignValues> ValuesOf(const Layout& layout, uint32_t parameter,
                                       const ForeignTensor& tensor) {
  OPTSTATE_ASSIGN_OR_RETURN(const ParameterSpec* const spec,
                            SpecOf(layout, parameter));
  OPTSTATE_ASSIGN_OR_RETURN(const HostMemory memory,
                            HostMemoryOf(*spec, tensor));
  if (!memory.dtype.has_value()) {
    return Wrong(*spec, absl::StrCat("is ", DTypeText(tensor),
                                     ": give float32, bfloat16 or float16"));
  }
  return ForeignValues{.dtype = *memory.dtype,
                       .data = {memory.data, static_cast<size_t>(spec->numel) *
                                                 SizeInBytes(*memory.dtype)}};
}

}  // namespace optstate::client
