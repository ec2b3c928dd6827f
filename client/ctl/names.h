#ifndef OPTSTATE_CLIENT_CTL_NAMES_H_
#define OPTSTATE_CLIENT_CTL_NAMES_H_

#include <string>

#include "optstate/v1/types.pb.h"

namespace optstate::ctl {

// The text for unknown values in tables.
inline constexpr char kUnknown[] = "?";

// Enum values in readable form: "ready", "adamw", "greedy", "float32".
std::string Name(v1::JobPhase phase);  // kUnknown when unspecified
std::string Name(v1::OptimizerKind optimizer);
std::string Name(v1::PartitionMode mode);
std::string Name(v1::DType dtype);
// "[3,4]"; "[]" for a scalar.
std::string Shape(const v1::Parameter& parameter);
// "applied", "skipped (inf or NaN)" ...
std::string Outcome(const v1::StepOutcome& outcome);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_NAMES_H_
