#ifndef OPTSTATE_SERVER_SESSION_STEPS_LOSS_SCALER_H_
#define OPTSTATE_SERVER_SESSION_STEPS_LOSS_SCALER_H_

#include "absl/status/status.h"
#include "optstate/v1/types.pb.h"
#include "storage/format/control_file.h"

namespace optstate::session {

// The daemon's loss scaler behaves as torch.amp.GradScaler (hysteresis 1,
// min_scale 0) and DeepSpeed's DynamicLossScaler. Its state is part of the
// step's record, so it advances exactly when the step does.

// Returns INVALID_ARGUMENT, naming the field: init_scale non-finite or not
// positive, growth_factor not above 1, backoff_factor not within (0, 1),
// growth_interval or hysteresis 0, hysteresis above 2^24 - 1, min_scale
// negative or above init_scale.
absl::Status CheckLossScaler(const v1::LossScaler& scaler);

// Returns INVALID_ARGUMENT, naming the field, when `state` is none that
// `scaler`, which was checked, can reach.
absl::Status CheckLossScalerState(const v1::LossScaler& scaler,
                                  const v1::LossScalerState& state);

// Replaces `former` in a job: the current scale is kept, unless init_scale
// differs or either scaler is static.
void ChangeLossScaler(const v1::LossScaler& former,
                      const v1::LossScaler& scaler,
                      storage::StepRecord* record);

// Sets the initial state, in a job that has taken no step.
void StartLossScaler(const v1::LossScaler& scaler, storage::StepRecord* record);

// Repairs the state of a scaler whose description an engine had written when it
// died, and its state not yet. Returns whether it changed the record.
bool RepairLossScaler(const v1::LossScaler& scaler,
                      storage::StepRecord* record);

// Sets the state to that of another job, which continues in this one.
void ContinueLossScaler(const v1::LossScalerState& state,
                        storage::StepRecord* record);

// Advances the state after a step that was applied, or skipped because of an
// overflow.
void AdvanceLossScaler(const v1::LossScaler& scaler, bool found_inf,
                       storage::StepRecord* record);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_LOSS_SCALER_H_
