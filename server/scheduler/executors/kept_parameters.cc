#include "server/scheduler/executors/kept_parameters.h"

#include <algorithm>

#include "kernels/whole_shape.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/executors/batch_memory.h"

namespace optstate::scheduler {

absl::StatusOr<std::unique_ptr<KeptParameters>> KeptParameters::Make(
    absl::Span<accelerator::Device* const> devices, uint64_t device_bytes,
    size_t parameters) {
  std::unique_ptr<KeptParameters> made(new KeptParameters(parameters));
  for (accelerator::Device* const device : devices) {
    Place& place = made->places_.emplace_back();
    if (device == nullptr) continue;
    place.device = device;
    const uint64_t room = BatchMemory::Aligned(device_bytes);
    OPTSTATE_ASSIGN_OR_RETURN(place.memory, device->Allocate(room));
    place.room = room;
  }
  return made;
}

KeptParameters::~KeptParameters() {
  for (const Place& place : places_) {
    if (!place.memory.is_null()) place.device->Free(place.memory);
  }
}

uint64_t KeptParameters::BytesOf(const WholeParameter& facts) {
  const auto bytes_of = [](uint64_t elements) {
    return BatchMemory::Aligned(elements * sizeof(float));
  };
  uint64_t bytes = bytes_of(kernels::NumelOf(facts.shape));
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (facts.keeps_floats[k]) bytes += bytes_of(facts.state_elements[k]);
  }
  return bytes;
}

KeptParameter* KeptParameters::PlaceOf(uint32_t parameter,
                                       const WholeRecord& record,
                                       const std::vector<bool>& is_lost) {
  KeptParameter* kept = Find(parameter);
  if (kept != nullptr && is_lost[kept->device]) {
    GiveUp(parameter);
    kept = nullptr;
  }
  if (kept == nullptr) kept = Admit(parameter, record.Describe(parameter));
  return kept == nullptr || is_lost[kept->device] ? nullptr : kept;
}

KeptParameter* KeptParameters::Admit(uint32_t parameter,
                                     const WholeParameter& facts) {
  const uint64_t bytes = BytesOf(facts);
  const auto most = std::max_element(
      places_.begin(), places_.end(),
      [](const Place& a, const Place& b) { return a.free() < b.free(); });
  if (bytes > most->free()) return nullptr;
  most->used += bytes;
  most->elements += kernels::NumelOf(facts.shape);
  KeptParameter& kept = kept_[parameter];
  kept.device = static_cast<size_t>(most - places_.begin());
  kept.memory = most->memory + most->free();
  kept.Drop();
  return &kept;
}

void KeptParameters::GiveUp(uint32_t parameter) {
  KeptParameter& kept = kept_[parameter];
  // Nothing gets a place there any more.
  places_[kept.device].room = places_[kept.device].used = 0;
  places_[kept.device].elements = 0;
  kept.memory = {};
  kept.Drop();
}

void KeptParameters::Drop(const SubGroup& sub_group) {
  for (uint32_t p = sub_group.first_parameter; p < sub_group.end_parameter;
       ++p) {
    kept_[p].Drop();
  }
}

void KeptParameters::Drop() {
  for (KeptParameter& kept : kept_) kept.Drop();
}

bool KeptParameters::Has(const SubGroup& sub_group) {
  for (uint32_t p = sub_group.first_parameter; p < sub_group.end_parameter;
       ++p) {
    if (kept_[p].step.load(std::memory_order_relaxed) !=
        KeptParameter::kNoStep) {
      return true;
    }
  }
  return false;
}

}  // namespace optstate::scheduler
