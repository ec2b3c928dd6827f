#ifndef OPTSTATE_SERVER_SESSION_JOB_DESCRIPTION_H_
#define OPTSTATE_SERVER_SESSION_JOB_DESCRIPTION_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "server/session/job_types.h"

namespace optstate::session {

// A job as described by its registration: kept in job.binpb as a
// v1.RegisterRequest (of rank 0), so that a restarted engine knows the job.
struct JobDescription {
  Layout layout;
  uint32_t world_size = 1;
  std::string host_id;
  PartitionMode partition = PartitionMode::kGreedy;
  bool accumulate = false;
  bool ephemeral = false;
  std::optional<v1::LossScaler> loss_scaler;
  AccumulateDType accumulate_dtype = AccumulateDType::kFloat32;
  v1::StorageSettings storage;  // resolved, of a job that was made
  bool speculative = false;

  Accumulation accumulation() const {
    return accumulate ? Accumulation(accumulate_dtype) : std::nullopt;
  }
};

std::string TextOf(const std::optional<v1::LossScaler>& scaler);

// Returns INVALID_ARGUMENT: world size or rank out of range, bad loss scaler.
// UNIMPLEMENTED: ranks on several machines.
absl::StatusOr<JobDescription> DescriptionOf(const RegisterSpec& spec);

std::string SerializeDescription(const JobDescription& description);
// Returns DATA_LOSS when the bytes are no description.
absl::StatusOr<JobDescription> ParseDescription(const std::string& bytes);

// Returns OK when a rank may register `asked` while others are attached to
// `now`. The layouts were compared before. FAILED_PRECONDITION names the first
// setting that differs; UNIMPLEMENTED: another machine.
absl::Status CheckSameSettings(const JobDescription& now,
                               const JobDescription& asked);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_DESCRIPTION_H_
