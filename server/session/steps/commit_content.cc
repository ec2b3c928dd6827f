#include "server/session/steps/commit_content.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "proto/types/status_macros.h"

namespace optstate::session {
namespace {

class Fnv1a {
 public:
  void Add(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3; }
  void Add(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    Add(bits);
  }
  void Add(uint64_t bits) {
    for (int shift = 0; shift < 64; shift += 8) {
      Add(static_cast<uint8_t>(bits >> shift));
    }
  }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

// Prints enough digits to tell any two doubles apart.
std::string Exact(double value) { return absl::StrFormat("%.17g", value); }

absl::Status Unequal(absl::string_view what, uint32_t rank_a, double a,
                     uint32_t rank_b, double b) {
  return absl::FailedPreconditionError(absl::StrCat(
      "the ranks' commits differ: ", what, " is ", Exact(a), " at rank ",
      rank_a, " and ", Exact(b), " at rank ", rank_b,
      "; what was staged is dropped, push and commit the step again"));
}

// Compares bitwise, as the digest does.
bool Same(double a, double b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

absl::Status CheckClipsWith(const CommitSpec& spec) {
  if (spec.clips_with.empty()) return absl::OkStatus();
  if (spec.clips_with.size() != spec.groups.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("clips_with of ", spec.clips_with.size(),
                     " groups, the commit has ", spec.groups.size()));
  }
  for (uint32_t group = 0; group < spec.groups.size(); ++group) {
    const uint32_t first = FirstOfClipped(spec, group);
    if (first == group) continue;
    if (first > group || FirstOfClipped(spec, first) != first ||
        !Same(spec.groups[first].max_norm, spec.groups[group].max_norm)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Invalid clips_with of group ", group, ": ", spec.clips_with[group],
          ": must be 0, or 1 + the number of an earlier group with clips_with "
          "0 and the same max_norm"));
    }
  }
  return absl::OkStatus();
}

bool HasMaxNorm(const CommitSpec& spec) {
  return spec.max_norm != 0 ||
         std::any_of(
             spec.groups.begin(), spec.groups.end(),
             [](const Hyperparams& group) { return group.max_norm != 0; });
}

}  // namespace

uint32_t FirstOfClipped(const CommitSpec& spec, uint32_t group) {
  if (spec.clips_with.empty() || spec.clips_with[group] == 0) return group;
  return spec.clips_with[group] - 1;
}

absl::Status CheckContent(const CommitSpec& spec, OptimizerKind optimizer,
                          size_t group_count) {
  if (spec.groups.size() != group_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("hyperparameters of ", spec.groups.size(),
                     " groups, the job has ", group_count));
  }
  for (size_t group = 0; group < group_count; ++group) {
    const absl::Status valid = Validate(optimizer, spec.groups[group]);
    if (!valid.ok()) return Annotate(valid, absl::StrCat("group ", group));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckClipsWith(spec));
  if (!std::isfinite(spec.grad_scale) || spec.grad_scale <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("Invalid grad_scale: ", spec.grad_scale,
                     ": must be finite and greater than 0"));
  }
  if (!std::isfinite(spec.max_norm) || spec.max_norm < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("Invalid max_norm: ", spec.max_norm,
                     ": must be finite and not negative"));
  }
  if (!std::isfinite(spec.max_value) || spec.max_value < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("Invalid max_value: ", spec.max_value,
                     ": must be finite and not negative"));
  }
  if (spec.norm_type != 1 && spec.norm_type != 2 &&
      spec.norm_type != std::numeric_limits<double>::infinity()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Invalid norm_type: ", spec.norm_type, ": must be 1, 2 or infinity"));
  }
  if (spec.awaits_norm && (!spec.two_phase || HasMaxNorm(spec))) {
    return absl::InvalidArgumentError(
        "awaits_norm is for steps of two phases whose max_norm, and that of "
        "each group, is 0: the norm of all nodes clips them");
  }
  return absl::OkStatus();
}

uint64_t DigestOf(const CommitSpec& spec) {
  Fnv1a digest;
  for (const Hyperparams& group : spec.groups) {
    for (double value : group.value) digest.Add(value);
    digest.Add(group.max_norm);
  }
  digest.Add(spec.grad_scale);
  digest.Add(spec.max_norm);
  digest.Add(spec.max_value);
  digest.Add(spec.norm_type);
  for (uint32_t group = 0; group < spec.groups.size(); ++group) {
    const uint32_t first = FirstOfClipped(spec, group);
    if (first == group) continue;
    digest.Add(static_cast<double>(group));
    digest.Add(static_cast<double>(first));
  }
  return digest.hash();
}

uint64_t PreparedDigest(const CommitSpec& spec, absl::string_view layout_hash,
                        uint32_t loads_finished,
                        absl::Span<const double> gradient_norms) {
  Fnv1a digest;
  digest.Add(spec.step);
  digest.Add(DigestOf(spec));
  for (const char byte : layout_hash) digest.Add(static_cast<uint8_t>(byte));
  digest.Add(uint64_t{loads_finished});
  for (const double norm : gradient_norms) {
    digest.Add(std::isnan(norm) ? std::numeric_limits<double>::quiet_NaN()
                                : norm);
  }
  return digest.hash() == 0 ? 1 : digest.hash();
}

bool AsksForTheSame(const CommitSpec& a, const CommitSpec& b) {
  for (uint32_t i = 0; i < a.groups.size(); ++i) {
    const Hyperparams& x = a.groups[i];
    const Hyperparams& y = b.groups[i];
    if (std::memcmp(x.value.data(), y.value.data(), sizeof(x.value)) != 0 ||
        !Same(x.max_norm, y.max_norm) ||
        FirstOfClipped(a, i) != FirstOfClipped(b, i)) {
      return false;
    }
  }
  return Same(a.grad_scale, b.grad_scale) && Same(a.max_norm, b.max_norm) &&
         Same(a.max_value, b.max_value) && Same(a.norm_type, b.norm_type);
}

absl::Status CheckEqual(OptimizerKind optimizer, uint32_t rank_a,
                        const CommitSpec& a, uint32_t rank_b,
                        const CommitSpec& b) {
  const auto infos = InfoOf(optimizer).hyperparams;
  for (size_t i = 0; i < a.groups.size(); ++i) {
    const Hyperparams& x = a.groups[i];
    const Hyperparams& y = b.groups[i];
    for (size_t k = 0; k < infos.size(); ++k) {
      if (Same(x[k], y[k])) continue;
      return Unequal(absl::StrCat(infos[k].name, " of group ", i), rank_a, x[k],
                     rank_b, y[k]);
    }
    if (!Same(x.max_norm, y.max_norm)) {
      return Unequal(absl::StrCat("max_norm of group ", i), rank_a, x.max_norm,
                     rank_b, y.max_norm);
    }
    const uint32_t first_a = FirstOfClipped(a, static_cast<uint32_t>(i));
    const uint32_t first_b = FirstOfClipped(b, static_cast<uint32_t>(i));
    if (first_a != first_b) {
      return Unequal(
          absl::StrCat("the group that group ", i, " is clipped with"), rank_a,
          first_a, rank_b, first_b);
    }
  }
  struct Field {
    absl::string_view name;
    double a;
    double b;
  };
  const Field fields[] = {
      {"grad_scale", a.grad_scale, b.grad_scale},
      {"max_norm", a.max_norm, b.max_norm},
      {"max_value", a.max_value, b.max_value},
      {"norm_type", a.norm_type, b.norm_type},
      {"two_phase", a.two_phase ? 1.0 : 0.0, b.two_phase ? 1.0 : 0.0},
      {"awaits_norm", a.awaits_norm ? 1.0 : 0.0, b.awaits_norm ? 1.0 : 0.0}};
  for (const Field& field : fields) {
    if (Same(field.a, field.b)) continue;
    return Unequal(field.name, rank_a, field.a, rank_b, field.b);
  }
  return absl::OkStatus();
}

}  // namespace optstate::session
