#include "server/session/commit_content.h"

#include <cmath>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

class Fnv1a {
 public:
  void Add(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3; }
  void Add(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    for (int shift = 0; shift < 64; shift += 8) {
      Add(static_cast<uint8_t>(bits >> shift));
    }
  }
  uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

// Enough digits to tell any two doubles apart.
std::string Exact(double value) { return absl::StrFormat("%.17g", value); }

absl::Status Unequal(absl::string_view what, uint32_t rank_a, double a,
                     uint32_t rank_b, double b) {
  return absl::FailedPreconditionError(absl::StrCat(
      "the ranks' commits differ: ", what, " is ", Exact(a), " at rank ",
      rank_a, " and ", Exact(b), " at rank ", rank_b,
      "; what was staged is dropped, push and commit the step again"));
}

// Bitwise, as the digest.
bool Same(double a, double b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

}  // namespace

absl::Status CheckContent(const CommitSpec& spec, size_t group_count) {
  if (spec.groups.size() != group_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("hyperparameters of ", spec.groups.size(),
                     " groups, the job has ", group_count));
  }
  for (size_t group = 0; group < group_count; ++group) {
    const absl::Status valid = Validate(spec.groups[group]);
    if (!valid.ok()) return Annotate(valid, absl::StrCat("group ", group));
  }
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
  return absl::OkStatus();
}

uint64_t DigestOf(const CommitSpec& spec) {
  Fnv1a digest;
  for (const Hyperparams& group : spec.groups) {
    digest.Add(group.lr);
    digest.Add(group.beta1);
    digest.Add(group.beta2);
    digest.Add(group.eps);
    digest.Add(group.weight_decay);
    digest.Add(static_cast<uint8_t>(group.maximize ? 1 : 0));
  }
  digest.Add(spec.grad_scale);
  digest.Add(spec.max_norm);
  return digest.hash();
}

absl::Status CheckEqual(uint32_t rank_a, const CommitSpec& a, uint32_t rank_b,
                        const CommitSpec& b) {
  struct Field {
    absl::string_view name;
    double a;
    double b;
  };
  for (size_t i = 0; i < a.groups.size(); ++i) {
    const Hyperparams& x = a.groups[i];
    const Hyperparams& y = b.groups[i];
    const Field fields[] = {
        {"lr", x.lr, y.lr},
        {"beta1", x.beta1, y.beta1},
        {"beta2", x.beta2, y.beta2},
        {"eps", x.eps, y.eps},
        {"weight_decay", x.weight_decay, y.weight_decay},
        {"maximize", x.maximize ? 1.0 : 0.0, y.maximize ? 1.0 : 0.0},
    };
    for (const Field& field : fields) {
      if (Same(field.a, field.b)) continue;
      return Unequal(absl::StrCat(field.name, " of group ", i), rank_a, field.a,
                     rank_b, field.b);
    }
  }
  if (!Same(a.grad_scale, b.grad_scale)) {
    return Unequal("grad_scale", rank_a, a.grad_scale, rank_b, b.grad_scale);
  }
  if (!Same(a.max_norm, b.max_norm)) {
    return Unequal("max_norm", rank_a, a.max_norm, rank_b, b.max_norm);
  }
  return absl::OkStatus();
}

}  // namespace optstate
