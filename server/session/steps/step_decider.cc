#include "server/session/steps/step_decider.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/session/steps/clipping.h"
#include "server/session/steps/commit_content.h"

namespace optstate::session {

void StepDecider::Reset() {
  intent_groups_.resize(job_.layout().groups().size());
  group_norms_.resize(job_.layout().groups().size());
  updated_of_group_.resize(job_.parameter_count());
  gradient_norms_.resize(job_.parameter_count());
  gradient_norms_step_ = 0;
}

double StepDecider::SumOfSquares(absl::Span<const uint8_t> updated) {
  return job_.scheduler->SumOfSquares(updated, absl::MakeSpan(group_norms_));
}

absl::Span<const storage::StepIntentGroup> StepDecider::GroupsWithoutClipping(
    const CommitSpec& spec) {
  std::fill(group_norms_.begin(), group_norms_.end(), 0);
  FillGroups(spec, group_norms_, /*coefficient=*/1,
             absl::MakeSpan(intent_groups_));
  return intent_groups_;
}

StepDecision StepDecider::Decide(uint64_t step,
                                 absl::Span<const uint8_t> updated) {
  const CommitSpec& spec = step_.open_step.commit(0).spec();
  const double sum = SumOfSquares(updated);
  StepDecision decision;
  StepOutcome& outcome = decision.outcome;
  outcome.step = step;
  outcome.gradient_norm =
      ComputeNorm(spec.norm_type, updated, sum) / spec.grad_scale;
  // True also when finite gradients overflow as they are unscaled.
  outcome.found_inf = !std::isfinite(outcome.gradient_norm);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    outcome.found_inf |= step_.open_step.commit(rank).spec().found_inf;
  }
  outcome.applied = !outcome.found_inf;
  if (outcome.applied) {
    outcome.clip_coefficient =
        ClipCoefficient(spec.max_norm, outcome.gradient_norm);
  }
  ComputeGroupNorms(spec, updated);
  FillGroups(spec, group_norms_, outcome.clip_coefficient,
             absl::MakeSpan(intent_groups_));
  decision.clipped = IsClipped(spec, intent_groups_);
  return decision;
}

// Returns the norm of the gradients as they arrived. Other norms than L2 are
// not computed while gradients arrive, because only the commit asks for them.
double StepDecider::ComputeNorm(double norm_type,
                                absl::Span<const uint8_t> updated,
                                double sum_of_squares) {
  if (norm_type == 2 || !std::isfinite(sum_of_squares)) {
    return std::sqrt(sum_of_squares);
  }
  scheduler::StepScheduler::Update update;
  update.updated = updated;
  update.pushed_by = step_.open_step.pushed_by();
  update.gradient_areas = ranks_.gradient_areas();
  return job_.Norm(norm_type, update);
}

double StepDecider::ComputeGroupNorm(size_t group, const CommitSpec& spec,
                                     absl::Span<const uint8_t> updated,
                                     double sum_of_squares) {
  if (spec.norm_type == 2 || spec.groups[group].max_norm == 0) {
    return std::sqrt(sum_of_squares);
  }
  const auto parameters = job_.layout().parameters();
  for (uint32_t p = 0; p < job_.parameter_count(); ++p) {
    updated_of_group_[p] =
        updated[p] != 0 && FirstOfClipped(spec, parameters[p].group) == group;
  }
  return ComputeNorm(spec.norm_type, updated_of_group_, sum_of_squares);
}

// Computes group_norms_ from the sums of squares in it.
void StepDecider::ComputeGroupNorms(const CommitSpec& spec,
                                    absl::Span<const uint8_t> updated) {
  AddUpSharedNorms(spec, absl::MakeSpan(group_norms_));
  for (uint32_t i = 0; i < spec.groups.size(); ++i) {
    const uint32_t first = FirstOfClipped(spec, i);
    group_norms_[i] = first == i
                          ? ComputeGroupNorm(i, spec, updated, group_norms_[i])
                          : group_norms_[first];
  }
}

// Keeps the norms for Fetch; pushes of the next step overwrite the sums.
void StepDecider::KeepGradientNorms(uint64_t step,
                                    absl::Span<const uint8_t> updated) {
  job_.scheduler->NormsByParameter(updated, absl::MakeSpan(gradient_norms_));
  for (uint32_t p = 0; p < job_.parameter_count(); ++p) {
    double& norm = gradient_norms_[p];
    norm = updated[p] == 0 ? -1
                           : norm / step_.open_step.commit(0).spec().grad_scale;
  }
  gradient_norms_step_ = step;
}

absl::Status StepDecider::CheckGradientNorms() const {
  if (gradient_norms_step_ != 0 &&
      gradient_norms_step_ == job_.record().committed_step) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", job_.options.name, "\": gradient norms of step ",
      job_.record().committed_step,
      " are not known: they are of steps that this engine has taken, and none "
      "outlives it; take a step first"));
}

}  // namespace optstate::session
