#ifndef OPTSTATE_SERVER_SESSION_STEPS_CLIPPING_H_
#define OPTSTATE_SERVER_SESSION_STEPS_CLIPPING_H_

#include "absl/types/span.h"
#include "server/session/job_types.h"
#include "storage/format/step_intent.h"

namespace optstate::session {

// How gradients are clipped by norms. Pure arithmetic, in double.

// Returns the coefficient of torch.nn.utils.clip_grad_norm_; max_norm 0 does
// not clip.
double ClipCoefficient(double max_norm, double norm);

// Adds the sum of squares of each group to that of the first group with which
// it is clipped; `sums` has one entry per group.
void AddUpSharedNorms(const CommitSpec& spec, absl::Span<double> sums);

// Fills in what the update of each group does. Each group is clipped by its own
// norm in `norms`, of gradients as they arrived, and all by `coefficient`: the
// coefficients multiply, that of all last, as RecoveredStep::Clip() does it.
void FillGroups(const CommitSpec& spec, absl::Span<const double> norms,
                double coefficient,
                absl::Span<storage::StepIntentGroup> groups);

// Returns whether the factor of some group is not 1 / grad_scale.
bool IsClipped(const CommitSpec& spec,
               absl::Span<const storage::StepIntentGroup> groups);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_CLIPPING_H_
