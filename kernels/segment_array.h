#ifndef OPTSTATE_KERNELS_SEGMENT_ARRAY_H_
#define OPTSTATE_KERNELS_SEGMENT_ARRAY_H_

#include <algorithm>
#include <cstddef>

#include "proto/shm/sealed_segment.h"

namespace optstate::kernels {

// An array for benchmarks, in pages of the kind and placement that an engine's
// arrays have (proto/shm/spread_mapping.h). Aborts when there is no memory.
// Move-only.
template <typename T>
class SegmentArray {
 public:
  explicit SegmentArray(size_t numel, T value = T())
      : segment_(*shm::SealedSegment::Create("benchmark", numel * sizeof(T))) {
    std::fill_n(data(), numel, value);
  }

  T* data() const { return reinterpret_cast<T*>(segment_.data()); }

 private:
  shm::SealedSegment segment_;
};

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_SEGMENT_ARRAY_H_
