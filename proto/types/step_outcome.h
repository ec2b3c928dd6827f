#ifndef OPTSTATE_PROTO_TYPES_STEP_OUTCOME_H_
#define OPTSTATE_PROTO_TYPES_STEP_OUTCOME_H_

#include <cstdint>

namespace optstate {

// The result of a step; mirrors v1::StepOutcome, as plain data.
struct StepOutcome {
  uint64_t step = 0;
  bool applied = false;    // false: skipped, see found_inf
  bool found_inf = false;  // some gradient was NaN or infinite
  // The L2 norm of all unscaled gradients of the step, before clipping.
  double gradient_norm = 0;
  double clip_coefficient = 1;  // 1 when not clipped
  uint64_t update_ns = 0;       // time of the update pass in the engine
  double loss_scale = 0;        // for the next step; 0: no LossScaler
  // The value of a dynamic LossScaler, as in v1::LossScalerState; 0 from an
  // older daemon.
  uint32_t good_steps = 0;
  uint32_t hysteresis_left = 0;
  uint64_t durable_step = 0;  // the last that survives a reboot; 0: none
  bool prepared = false;      // not taken yet: what it will do
  uint64_t digest = 0;        // of what was prepared; 0: taken in one phase
};

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_STEP_OUTCOME_H_
