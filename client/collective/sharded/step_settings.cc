#include "client/collective/sharded/step_settings.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/session/content_digest.h"

namespace optstate::client {

std::optional<NormType> NormTypeOf(double norm_type) {
  if (norm_type == 2) return NormType::kEuclidean;
  if (norm_type == 1) return NormType::kSumOfAbsolutes;
  if (norm_type == std::numeric_limits<double>::infinity()) {
    return NormType::kLargestAbsolute;
  }
  return std::nullopt;
}

double ClipCoefficient(double max_norm, double norm) {
  return max_norm == 0 ? 1 : std::min(1.0, max_norm / (norm + 1e-6));
}

uint64_t SettingsDigest(const CommitOptions& commit) {
  std::vector<double> values = {commit.grad_scale, commit.max_norm,
                                commit.max_value, commit.norm_type};
  for (const Hyperparams& group : commit.groups) {
    values.insert(values.end(), group.value.begin(), group.value.end());
    values.push_back(group.max_norm);
  }
  values.insert(values.end(), commit.clips_with.begin(),
                commit.clips_with.end());
  return ContentDigest(
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                          values.size() * sizeof(double)),
      /*seed=*/0);
}

absl::Status CheckSettings(const CommitOptions& commit, size_t group_count,
                           bool is_split) {
  if (commit.groups.size() != group_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("the commit has hyperparameters of ", commit.groups.size(),
                     " groups, the layout has ", group_count));
  }
  if (!commit.clips_with.empty() &&
      commit.clips_with.size() != commit.groups.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the commit has clips_with of ", commit.clips_with.size(),
                     " groups, and ", commit.groups.size(), " groups"));
  }
  if (!std::isfinite(commit.max_norm) || commit.max_norm < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("Invalid max_norm: ", commit.max_norm,
                     ": must be finite and not negative"));
  }
  if (!std::isfinite(commit.grad_scale) || commit.grad_scale <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("Invalid grad_scale: ", commit.grad_scale,
                     ": must be finite and greater than 0"));
  }
  if (!NormTypeOf(commit.norm_type).has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Invalid norm_type: ", commit.norm_type, ": must be 1, 2 or infinity"));
  }
  const bool clips_groups =
      std::any_of(commit.groups.begin(), commit.groups.end(),
                  [](const Hyperparams& each) { return each.max_norm != 0; });
  if (!clips_groups || !is_split) return absl::OkStatus();
  return absl::UnimplementedError(
      "max_norm of a group cannot be had on several nodes, because each daemon "
      "knows the norm of its own share alone: give max_norm to the commit, or "
      "clip the group's gradients before the step");
}

}  // namespace optstate::client
