// Begins a step before it is decided.

#include <algorithm>
#include <cmath>

#include "server/session/commit_content.h"
#include "server/session/job_impl.h"

namespace optstate {

bool JobImpl::Speculated() const {
  return tier_->control()->step_speculated.load(std::memory_order_relaxed) ==
         record().committed_step + 1;
}

// Updates parameters early when some ranks have committed and others have not:
// as if nothing were to be skipped or clipped, and only parameters to which no
// rank can push any more.
void JobImpl::Speculate(uint32_t rank) {
  if (SpeculationBytes(shape_->description) == 0) {
    return;
  }
  const CommitSpec& spec = open_step_.commit(rank).spec;
  const absl::Span<const uint8_t> updated = open_step_.CommittedParameters();
  const double sum =
      scheduler_->SumOfSquares(updated, absl::MakeSpan(group_norms_));
  if (spec.found_inf || !std::isfinite(sum)) return;
  for (uint32_t other = 0; other < ranks_.size(); ++other) {
    if (other == rank || !open_step_.commit(other).committed) continue;
    // The step will be refused to all; what was begun is rolled back then.
    if (!CheckEqual(layout_of_job().optimizer(), other,
                    open_step_.commit(other).spec, rank, spec)
             .ok()) {
      return;
    }
  }
  StepScheduler::Update update;
  update.step = spec.step;
  std::fill(group_norms_.begin(), group_norms_.end(), 0);  // nothing is clipped
  FillIntentGroups(spec, /*coefficient=*/1);
  update.groups = intent_groups_;
  update.gradient_limit = spec.max_value;
  update.updated = updated;
  update.gradient_areas = gradient_areas_;
  const StepTimer::Scope updating(&timer_, StepPhase::kUpdate);
  const absl::Status begun = scheduler_->Speculate(update);
  if (!begun.ok()) FailInside("a speculation", begun).IgnoreError();
}

absl::Status JobImpl::TakeBackSpeculation() {
  if (!Speculated()) return absl::OkStatus();
  const absl::Status restored =
      scheduler_->TakeBackSpeculation(record().committed_step + 1);
  return restored.ok() ? restored : FailInside("a speculation", restored);
}

}  // namespace optstate
