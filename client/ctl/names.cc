#include "client/ctl/names.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace optstate::ctl {
namespace {

// Returns a name such as JOB_PHASE_READY without its prefix, in lower case. A
// number from a newer daemon, for which this optctl has no name, stays a
// number.
template <typename Enum>
std::string Short(const std::string& full, absl::string_view prefix,
                  Enum value) {
  if (full.empty()) return absl::StrCat(static_cast<int>(value));
  return absl::AsciiStrToLower(absl::StripPrefix(full, prefix));
}

}  // namespace

std::string Name(v1::JobPhase phase) {
  if (phase == v1::JOB_PHASE_UNSPECIFIED) return kUnknown;
  return Short(v1::JobPhase_Name(phase), "JOB_PHASE_", phase);
}
std::string Name(v1::OptimizerKind optimizer) {
  return Short(v1::OptimizerKind_Name(optimizer), "OPTIMIZER_KIND_", optimizer);
}
std::string Name(v1::PartitionMode mode) {
  return Short(v1::PartitionMode_Name(mode), "PARTITION_MODE_", mode);
}
std::string Name(v1::DType dtype) {
  return Short(v1::DType_Name(dtype), "DTYPE_", dtype);
}

std::string Shape(const v1::Parameter& parameter) {
  return absl::StrCat("[", absl::StrJoin(parameter.shape(), ","), "]");
}

std::string Outcome(const v1::StepOutcome& outcome) {
  if (outcome.step() == 0) return "-";
  if (outcome.applied()) return "applied";
  return outcome.found_inf() ? "skipped (inf or NaN)" : "skipped";
}

}  // namespace optstate::ctl
