#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_WHOLE_PARAMETER_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_WHOLE_PARAMETER_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "proto/types/layout.h"

namespace optstate::scheduler {

// Facts that a whole parameter's update is computed from, besides its arrays.
// `shape` lives as long as the layout.
struct WholeParameter {
  absl::Span<const int64_t> shape;
  uint64_t state_elements[kStateArraysMax] = {};
  // The record gives back the floats that it was given, as it does of every
  // master: its format of the array is float32.
  bool keeps_floats[kStateArraysMax] = {};
  kernels::UpdateInput input;
};

// Returns the facts of a parameter of the layout, but for `input`.
WholeParameter WholeParameterOf(const Layout& layout, uint32_t parameter);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_WHOLE_PARAMETER_H_
