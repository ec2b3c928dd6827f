#include "server/session/steps/clipping.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "server/session/steps/commit_content.h"

namespace optstate::session {

double ClipCoefficient(double max_norm, double norm) {
  if (max_norm == 0) return 1;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

void AddUpSharedNorms(const CommitSpec& spec, absl::Span<double> sums) {
  for (uint32_t i = 0; i < spec.groups.size(); ++i) {
    const uint32_t first = FirstOfClipped(spec, i);
    if (first != i) sums[first] += sums[i];
  }
}

void FillGroups(const CommitSpec& spec, absl::Span<const double> norms,
                double coefficient,
                absl::Span<storage::StepIntentGroup> groups) {
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    const double norm = norms[i] / spec.grad_scale;
    groups[i].hyperparams = spec.groups[i];
    groups[i].gradient_factor =
        coefficient *
        (ClipCoefficient(spec.groups[i].max_norm, norm) / spec.grad_scale);
  }
}

bool IsClipped(const CommitSpec& spec,
               absl::Span<const storage::StepIntentGroup> groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [&](const storage::StepIntentGroup& group) {
                       return group.gradient_factor != 1 / spec.grad_scale;
                     });
}

}  // namespace optstate::session
