#include "tests/simulation/step_book.h"

#include "absl/base/casts.h"
#include "absl/strings/str_cat.h"
#include "tests/simulation/tiny_job.h"

namespace optstate::simulation {
namespace {

std::string Describe(const StepOutcome& outcome) {
  return absl::StrCat(outcome.applied ? "applied" : "skipped", ", found_inf ",
                      outcome.found_inf, ", norm ", outcome.gradient_norm,
                      ", digest ", absl::Hex(outcome.digest));
}

// A step that is skipped has no norm that nodes would have to agree on.
bool AreEqual(const StepOutcome& a, const StepOutcome& b) {
  return a.applied == b.applied && a.found_inf == b.found_inf &&
         a.digest == b.digest &&
         (!a.applied || (a.gradient_norm == b.gradient_norm &&
                         a.clip_coefficient == b.clip_coefficient));
}

}  // namespace

void StepBook::Note(uint32_t node, uint32_t rank, const StepOutcome& outcome) {
  trace_.Add(outcome.step);
  trace_.Add(outcome.digest);
  trace_.Add(uint64_t{outcome.applied} << 1 | uint64_t{outcome.found_inf});
  const auto [found, is_first] = told_.try_emplace(
      outcome.step, Told{.outcome = outcome, .node = node, .rank = rank});
  Told& told = found->second;
  ++told.ranks;
  if (is_first && outcome.applied) {
    trace_.Add(absl::bit_cast<uint64_t>(outcome.gradient_norm));
  }
  if (!first_difference_.empty()) return;
  if (outcome.prepared) {
    first_difference_ =
        absl::StrCat("step ", outcome.step, ": rank ", rank, " of node ", node,
                     " was told that it is only prepared");
  } else if (outcome.applied == TinyJob::IsSkipped(outcome.step)) {
    first_difference_ = absl::StrCat(
        "step ", outcome.step, ": rank ", rank, " of node ", node, " was told ",
        Describe(outcome), ", against what its script asked for");
  } else if (!AreEqual(outcome, told.outcome)) {
    first_difference_ =
        absl::StrCat("step ", outcome.step, ": rank ", told.rank, " of node ",
                     told.node, " was told ", Describe(told.outcome), "; rank ",
                     rank, " of node ", node, " ", Describe(outcome));
  }
}

uint64_t StepBook::told(uint64_t step) const {
  const auto found = told_.find(step);
  return found == told_.end() ? 0 : found->second.ranks;
}

}  // namespace optstate::simulation
