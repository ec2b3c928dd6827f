#ifndef OPTSTATE_SERVER_SCHEDULER_STEP_UPDATE_H_
#define OPTSTATE_SERVER_SCHEDULER_STEP_UPDATE_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "storage/format/step_intent.h"

namespace optstate::scheduler {

// The update of one group; its factor is clip coefficient / grad_scale.
using GroupUpdate = storage::StepIntentGroup;

// A step that will be applied. Runs that carry its stamp have it already.
struct StepUpdate {
  uint64_t step = 0;
  absl::Span<const GroupUpdate> groups;
  double gradient_limit = 0;          // see UpdateInput
  absl::Span<const uint8_t> updated;  // by parameter: 1: in this step
  // When replicated, by parameter, bit r: rank r's gradient is in the sum.
  // Empty: the gradients of all ranks are.
  absl::Span<const uint64_t> pushed_by;
  absl::Span<const std::byte* const> gradient_areas;  // by rank
  bool speculative = false;                           // set by Speculate()

  bool HasPushed(uint32_t rank, uint32_t parameter) const {
    return pushed_by.empty() || (pushed_by[parameter] >> rank & 1) != 0;
  }
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_STEP_UPDATE_H_
