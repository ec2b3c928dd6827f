#ifndef OPTSTATE_SERVER_SESSION_LOSS_SCALER_H_
#define OPTSTATE_SERVER_SESSION_LOSS_SCALER_H_

#include "absl/status/status.h"
#include "optstate/v1/types.pb.h"
#include "storage/format/control_file.h"

namespace optstate {

// The daemon's loss scaler: as torch.amp.GradScaler (hysteresis 1, min_scale 0)
// and DeepSpeed's DynamicLossScaler. Its state is part of the step's record, so
// it moves on exactly when the step does.

// INVALID_ARGUMENT, naming the field: init_scale not finite and positive,
// growth_factor not above 1, backoff_factor not within (0, 1), growth_interval
// or hysteresis 0, hysteresis above 2^24 - 1, min_scale negative or above
// init_scale.
absl::Status CheckLossScaler(const v1::LossScaler& scaler);

// INVALID_ARGUMENT, naming the field: `state` is none that `scaler`, which was
// checked, can come to.
absl::Status CheckLossScalerState(const v1::LossScaler& scaler,
                                  const v1::LossScalerState& state);

// Of a job that has had `former`: the scale that was found goes on, unless it
// is to begin at another one or never moves.
void ChangeLossScaler(const v1::LossScaler& former,
                      const v1::LossScaler& scaler, StepRecord* record);

// Of a job that has taken no step.
void StartLossScaler(const v1::LossScaler& scaler, StepRecord* record);

// The same, of a job in which another one goes on.
void ContinueLossScaler(const v1::LossScalerState& state, StepRecord* record);

// What follows a step that was applied, or skipped because of an overflow.
void AdvanceLossScaler(const v1::LossScaler& scaler, bool found_inf,
                       StepRecord* record);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_LOSS_SCALER_H_
