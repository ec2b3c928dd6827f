#include "server/session/transfer/element_access.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/master_format.h"
#include "kernels/state_format.h"
#include "proto/types/array_format.h"
#include "storage/state_scales.h"

namespace optstate::session {
namespace {

// The scale precedes the codes of a block in a payload.
constexpr uint64_t kScaleBytes = sizeof(float);

// Visits the blocks of a range of any size; payloads begin at multiples of 4
// bytes.
template <typename Body>
void ForEachBlock(const ElementRange& range, const Body& body) {
  for (uint64_t i = 0; i < range.numel; i += ElementAccess::kBlockElements) {
    ElementRange block = range;
    block.begin += i;
    block.numel =
        std::min<uint64_t>(range.numel - i, ElementAccess::kBlockElements);
    body(i, block);
  }
}

}  // namespace

uint64_t ElementAccess::ElementsOf(v1::StateArray array,
                                   const ParameterSpec& spec) const {
  const int index = IndexOf(array);
  const OptimizerInfo& info = layout_->optimizer_info();
  if (index < 0 || static_cast<size_t>(index) >= info.state_arrays.size()) {
    return static_cast<uint64_t>(spec.numel);
  }
  return StateElements(info, index, spec.shape);
}

absl::Status ElementAccess::Check(const ElementRange& range) const {
  const ParameterSpec& spec = layout_->parameters()[range.parameter];
  const uint64_t numel = ElementsOf(range.array, spec);
  if (range.begin > numel || range.numel > numel - range.begin) {
    return absl::InvalidArgumentError(absl::StrCat(
        range.numel, " elements from ", range.begin, " of parameter ",
        range.parameter, " \"", spec.name, "\", which has ", numel));
  }
  if (range.array == v1::STATE_ARRAY_MASTER ||
      range.array == v1::STATE_ARRAY_PARAMETER) {
    return absl::OkStatus();
  }
  const int index = IndexOf(range.array);
  const auto known = layout_->optimizer_info().state_arrays;
  if (index < 0 || static_cast<size_t>(index) >= known.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown state array ", static_cast<int>(range.array)));
  }
  if (!layout_->has_state_array(index, spec.group)) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", spec.group, " of parameter \"", spec.name,
                     "\" has no ", known[static_cast<size_t>(index)].name,
                     ": it is without the option that brings it"));
  }
  const uint64_t end = range.begin + range.numel;
  if (!storage::HasScales(ArrayFormat(*layout_, index)) ||
      (range.begin % kBlockElements == 0 &&
       (end % kBlockElements == 0 ||
        end == static_cast<uint64_t>(spec.numel)))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("elements from ", range.begin, " to ", end,
                   " of parameter \"", spec.name, "\" cut a block of ",
                   kBlockElements, ", which has one scale: take whole blocks"));
}

uint64_t ElementAccess::PayloadBytes(v1::StateArray array,
                                     uint64_t numel) const {
  if (IsPerParameter(array)) return numel * sizeof(int64_t);
  if (array == v1::STATE_ARRAY_MASTER) return numel * sizeof(float);
  const StateFormat format = ArrayFormat(*layout_, IndexOf(array));
  const uint64_t bytes = numel * SizeInBytes(format);
  if (!storage::HasScales(format)) return bytes;
  const uint64_t blocks = (numel + kBlockElements - 1) / kBlockElements;
  return bytes + blocks * kScaleBytes;
}

StateFormat ElementAccess::FormatOf(const ElementRange& range) const {
  return ArrayFormat(*layout_, IndexOf(range.array));
}

bool ElementAccess::IsNeverNegativeIn(const ElementRange& range) const {
  return IsNeverNegative(layout_->optimizer(), IndexOf(range.array));
}

absl::Status ElementAccess::ReadFloats(const ElementRange& range,
                                       float* out) const {
  const uint32_t p = range.parameter;
  return store_->ForEachRecord(
      p, range.begin, range.numel, storage::StateStore::Access::kRead,
      [&](const storage::RecordView& record, uint64_t begin, uint64_t numel) {
        float* const to = out + (begin - range.begin);
        if (range.array == v1::STATE_ARRAY_MASTER) {
          kernels::MasterToFloat(layout_->master_format(p),
                                 record.parameter(p, begin),
                                 record.master(p, begin), to, numel);
          return;
        }
        const int k = IndexOf(range.array);
        kernels::StateToFloat(FormatOf(range), IsNeverNegativeIn(range),
                              record.state(k, p, begin),
                              record.scale(k, p, begin), to, numel);
      });
}

absl::Status ElementAccess::ReadPayload(const ElementRange& range,
                                        std::byte* out) const {
  if (range.array == v1::STATE_ARRAY_MASTER) {
    return ReadFloats(range, reinterpret_cast<float*>(out));
  }
  const int k = IndexOf(range.array);
  const uint32_t p = range.parameter;
  std::byte* const scale = out;
  const bool has_scale = HasScale(range);
  if (has_scale) out += kScaleBytes;
  const uint64_t element_bytes = SizeInBytes(FormatOf(range));
  return store_->ForEachRecord(
      p, range.begin, range.numel, storage::StateStore::Access::kRead,
      [&](const storage::RecordView& record, uint64_t begin, uint64_t numel) {
        // A block lies in one record.
        if (has_scale) {
          std::memcpy(scale, record.scale(k, p, begin), kScaleBytes);
        }
        std::memcpy(out + (begin - range.begin) * element_bytes,
                    record.state(k, p, begin), numel * element_bytes);
      });
}

void ElementAccess::MakePayload(const ElementRange& range, const float* in,
                                std::byte* out) const {
  if (range.array == v1::STATE_ARRAY_MASTER) {
    std::memcpy(out, in, range.numel * sizeof(float));
    return;
  }
  auto* const scale = reinterpret_cast<float*>(out);
  const bool has_scale = HasScale(range);
  kernels::StateFromFloat(FormatOf(range), IsNeverNegativeIn(range), in,
                          out + (has_scale ? kScaleBytes : 0),
                          has_scale ? scale : nullptr, range.numel);
}

absl::Status ElementAccess::Write(const ElementRange& range,
                                  const std::byte* payload) const {
  if (IsPerParameter(range.array)) {
    void* const numbers = range.array == v1::STATE_ARRAY_STEP_COUNT
                              ? static_cast<void*>(store_->step_counts().data())
                              : static_cast<void*>(store_->scalars().data());
    std::memcpy(
        static_cast<std::byte*>(numbers) + range.begin * sizeof(int64_t),
        payload, range.numel * sizeof(int64_t));
    return absl::OkStatus();
  }
  absl::Status status;
  ForEachBlock(range, [&](uint64_t first, const ElementRange& block) {
    if (!status.ok()) return;
    status = WriteBlock(block, payload + PayloadBytes(range.array, first));
  });
  return status;
}

absl::Status ElementAccess::WriteMasters(const ElementRange& range,
                                         const float* in) const {
  const uint32_t p = range.parameter;
  return store_->ForEachRecord(
      p, range.begin, range.numel, storage::StateStore::Access::kWrite,
      [&](const storage::RecordView& record, uint64_t begin, uint64_t numel) {
        kernels::MasterFromFloat(
            layout_->master_format(p), layout_->parameters()[p].dtype,
            in + (begin - range.begin), record.parameter(p, begin),
            record.master(p, begin), numel);
      });
}

absl::Status ElementAccess::WriteBlock(const ElementRange& range,
                                       const std::byte* payload) const {
  if (range.array == v1::STATE_ARRAY_MASTER) {
    return WriteMasters(range, reinterpret_cast<const float*>(payload));
  }
  const int k = IndexOf(range.array);
  const uint32_t p = range.parameter;
  const std::byte* const scale = payload;
  const bool has_scale = HasScale(range);
  if (has_scale) payload += kScaleBytes;
  const uint64_t element_bytes = SizeInBytes(FormatOf(range));
  return store_->ForEachRecord(
      p, range.begin, range.numel, storage::StateStore::Access::kWrite,
      [&](const storage::RecordView& record, uint64_t begin, uint64_t numel) {
        // A block lies in one record.
        if (has_scale) {
          std::memcpy(record.scale(k, p, begin), scale, kScaleBytes);
        }
        std::memcpy(record.state(k, p, begin),
                    payload + (begin - range.begin) * element_bytes,
                    numel * element_bytes);
      });
}

}  // namespace optstate::session
