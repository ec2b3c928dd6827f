#include "server/session/element_access.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/state_format.h"
#include "proto/types/array_format.h"

namespace optstate {
namespace {

// Before the codes of a block, in a payload.
constexpr uint64_t kScaleBytes = sizeof(float);

// Of ranges of any size; payloads begin at multiples of 4 bytes.
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
  if (range.array == v1::STATE_ARRAY_MASTER) return absl::OkStatus();
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
  if (ArrayFormat(*layout_, index) != StateFormat::kDynamic8 ||
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
  if (format != StateFormat::kDynamic8) return numel * SizeInBytes(format);
  const uint64_t blocks = (numel + kBlockElements - 1) / kBlockElements;
  return numel + blocks * kScaleBytes;
}

ElementAccess::Place ElementAccess::PlaceOf(const ElementRange& range) const {
  const int index = IndexOf(range.array);
  const uint64_t flat = layout_->flat_offset(range.parameter) + range.begin;
  Place place;
  place.format = ArrayFormat(*layout_, index);
  place.data = arrays_.state[index] + flat * SizeInBytes(place.format);
  place.is_never_negative = IsNeverNegative(layout_->optimizer(), index);
  if (place.format == StateFormat::kDynamic8) {
    place.scale = arrays_.scale[index] + flat / kBlockElements;
  }
  return place;
}

void ElementAccess::ReadFloats(const ElementRange& range, float* out) const {
  if (range.array == v1::STATE_ARRAY_MASTER) {
    scheduler_->ReadMaster(range.parameter, range.begin, range.numel, out);
    return;
  }
  const Place place = PlaceOf(range);
  StateToFloat(place.format, place.is_never_negative, place.data, place.scale,
               out, range.numel);
}

void ElementAccess::ReadPayload(const ElementRange& range,
                                std::byte* out) const {
  if (range.array == v1::STATE_ARRAY_MASTER) {
    scheduler_->ReadMaster(range.parameter, range.begin, range.numel,
                           reinterpret_cast<float*>(out));
    return;
  }
  const Place place = PlaceOf(range);
  if (place.scale != nullptr) {
    std::memcpy(out, place.scale, kScaleBytes);
    out += kScaleBytes;
  }
  std::memcpy(out, place.data, range.numel * SizeInBytes(place.format));
}

void ElementAccess::MakePayload(const ElementRange& range, const float* in,
                                std::byte* out) const {
  if (range.array == v1::STATE_ARRAY_MASTER) {
    std::memcpy(out, in, range.numel * sizeof(float));
    return;
  }
  const Place place = PlaceOf(range);
  auto* const scale = reinterpret_cast<float*>(out);
  const bool has_scale = place.scale != nullptr;
  StateFromFloat(place.format, place.is_never_negative, in,
                 out + (has_scale ? kScaleBytes : 0),
                 has_scale ? scale : nullptr, range.numel);
}

void ElementAccess::Write(const ElementRange& range,
                          const std::byte* payload) const {
  if (IsPerParameter(range.array)) {
    void* const numbers = range.array == v1::STATE_ARRAY_STEP_COUNT
                              ? static_cast<void*>(arrays_.step_counts)
                              : static_cast<void*>(arrays_.scalars);
    std::memcpy(
        static_cast<std::byte*>(numbers) + range.begin * sizeof(int64_t),
        payload, range.numel * sizeof(int64_t));
    return;
  }
  ForEachBlock(range, [&](uint64_t first, const ElementRange& block) {
    WriteBlock(block, payload + PayloadBytes(range.array, first));
  });
}

void ElementAccess::WriteBlock(const ElementRange& range,
                               const std::byte* payload) const {
  if (range.array == v1::STATE_ARRAY_MASTER) {
    scheduler_->WriteMaster(range.parameter, range.begin, range.numel,
                            reinterpret_cast<const float*>(payload));
    return;
  }
  const Place place = PlaceOf(range);
  if (place.scale != nullptr) {
    std::memcpy(place.scale, payload, kScaleBytes);
    payload += kScaleBytes;
  }
  std::memcpy(place.data, payload, range.numel * SizeInBytes(place.format));
}

}  // namespace optstate
