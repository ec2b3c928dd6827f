#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_RANGE_CHECKS_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_RANGE_CHECKS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/types.pb.h"
#include "server/session/job_context.h"
#include "server/session/transfer/element_access.h"

namespace optstate::session {

// Checks of what ranks load and fetch. Errors are INVALID_ARGUMENT.

absl::Status CheckDataBytes(uint64_t expected, uint64_t found);
// Checks a range of an array with a number per parameter.
absl::Status CheckNoBegin(const ElementRange& range);
absl::Status CheckNumbers(const JobContext& job, v1::StateArray array,
                          uint64_t first, uint64_t count, uint64_t bytes);
// Checks the value of a step count or an optimizer's scalar.
absl::Status CheckNumber(const JobContext& job, v1::StateArray array,
                         uint64_t parameter, const std::byte* bytes);
// Returns the job's numbers from a parameter on.
const std::byte* NumbersAt(const JobContext& job, v1::StateArray array,
                           uint32_t parameter);
// Returns the index of the rank's piece to which the range belongs.
absl::StatusOr<size_t> FindPiece(const JobContext& job, uint32_t rank,
                                 const ElementRange& range);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_RANGE_CHECKS_H_
