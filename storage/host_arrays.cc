#include "storage/host_arrays.h"

#include <cstddef>
#include <utility>

namespace optstate::storage {
namespace {

bool IsOfRecords(int array) {
  return array == kMasterArray ||
         (array >= kState0Array && array <= kScale2Array);
}

// Returns the arrays that belong to the state, not to its recovery.
ArraySet Owned() {
  ArraySet owned;
  for (int i = 0; i < kStateArrayCount; ++i) {
    owned.set(static_cast<size_t>(i),
              !IsRecoveryArray(static_cast<StateArrayIndex>(i)));
  }
  return owned;
}

ArraySet WantedOf(const Layout& layout, const HostArrays& which) {
  ArraySet wanted = Owned();
  for (int i = 0; i < kStateArrayCount; ++i) {
    const auto index = static_cast<size_t>(i);
    const bool has =
        (which.has_records || !IsOfRecords(i)) &&
        (which.has_parameters || i != kParametersArray) &&
        HasArray(static_cast<StateArrayIndex>(i), layout, which.accumulation);
    wanted.set(index, wanted.test(index) && has);
  }
  return wanted;
}

}  // namespace

HostArrayFiles::HostArrayFiles(std::string folder)
    : files_(std::move(folder), Owned()) {}

uint64_t HostArrayFiles::BytesNeeded(const Layout& layout,
                                     const HostArrays& which) {
  return ArrayFiles::BytesNeeded(layout, WantedOf(layout, which));
}

absl::Status HostArrayFiles::Create(const Layout& layout,
                                    const HostArrays& which) {
  return files_.Create(layout, WantedOf(layout, which));
}

absl::Status HostArrayFiles::Open(const Layout& layout,
                                  const HostArrays& which) {
  return files_.Open(layout, WantedOf(layout, which));
}

absl::Status HostArrayFiles::Resize(const Layout& layout,
                                    const HostArrays& which) {
  return files_.Resize(layout, WantedOf(layout, which));
}

void HostArrayFiles::RemoveUnwanted(const Layout& layout,
                                    const HostArrays& which) {
  files_.RemoveUnwanted(layout, WantedOf(layout, which));
}

StateArrays HostArrayFiles::addresses() const {
  const auto at = [this](int array) {
    return files_.data(static_cast<StateArrayIndex>(array));
  };
  StateArrays arrays;
  arrays.parameters = at(kParametersArray);
  arrays.master = at(kMasterArray);
  for (int k = 0; k < kStateArraysMax; ++k) {
    arrays.state[k] = at(kState0Array + k);
    arrays.scale[k] = reinterpret_cast<float*>(at(kScale0Array + k));
  }
  arrays.accumulator = reinterpret_cast<float*>(at(kAccumulatorArray));
  arrays.gradient_accumulator = at(kGradientAccumulatorArray);
  arrays.step_counts = reinterpret_cast<int64_t*>(at(kStepCountsArray));
  arrays.scalars = reinterpret_cast<double*>(at(kScalarsArray));
  return arrays;
}

}  // namespace optstate::storage
