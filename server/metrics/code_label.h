#ifndef OPTSTATE_SERVER_METRICS_CODE_LABEL_H_
#define OPTSTATE_SERVER_METRICS_CODE_LABEL_H_

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "server/metrics/samples.h"

namespace optstate::metrics {

// Codes that have a sample before they are first counted: only then does the
// first of them show as an increase.
inline constexpr absl::StatusCode kCommonCodes[] = {
    absl::StatusCode::kInvalidArgument,   absl::StatusCode::kDeadlineExceeded,
    absl::StatusCode::kNotFound,          absl::StatusCode::kPermissionDenied,
    absl::StatusCode::kResourceExhausted, absl::StatusCode::kFailedPrecondition,
    absl::StatusCode::kUnavailable};

// Returns the label of a code: "resource_exhausted".
inline Label CodeLabel(absl::StatusCode code) {
  return {"code", absl::AsciiStrToLower(absl::StatusCodeToString(code))};
}

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_CODE_LABEL_H_
