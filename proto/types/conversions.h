#ifndef OPTSTATE_PROTO_TYPES_CONVERSIONS_H_
#define OPTSTATE_PROTO_TYPES_CONVERSIONS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/types.pb.h"
#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "proto/types/step_outcome.h"

namespace optstate {

// Conversions from messages to vocabulary types, checked once here; the errors
// name the field.
absl::StatusOr<Layout> LayoutFromProto(const v1::Layout& proto);
absl::StatusOr<PartitionMode> PartitionModeFromProto(v1::PartitionMode proto);
absl::StatusOr<DType> DTypeFromProto(v1::DType proto);
// Converts the dtype; unspecified is float32.
absl::StatusOr<AccumulateDType> AccumulateDTypeFromProto(
    v1::AccumulateDType proto);

v1::Parameter ToProto(const ParameterSpec& parameter);
v1::Layout ToProto(const Layout& layout);

v1::StepOutcome ToProto(const StepOutcome& outcome);
StepOutcome FromProto(const v1::StepOutcome& proto);

// Converts a status to and from the form in which it crosses a process
// boundary. Codes outside absl's become UNKNOWN.
v1::OpStatus ToProto(const absl::Status& status);
absl::Status FromProto(const v1::OpStatus& status);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_CONVERSIONS_H_
