#ifndef OPTSTATE_SERVER_SESSION_TIERS_NODE_BUDGET_H_
#define OPTSTATE_SERVER_SESSION_TIERS_NODE_BUDGET_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "optstate/v1/config.pb.h"

// Limits that the operator sets for all jobs of the node together: memory for
// the records that are swapped, and bytes of each directory on a disk. The use
// is counted from the jobs' files, so that the limits hold over engines and
// daemons; a caller that adds to it holds the AdmissionLock.
namespace optstate::session {

struct BytesOfJob {
  std::string job;
  uint64_t bytes = 0;
};

// Returns the jobs that have frames.
std::vector<BytesOfJob> FramesOfJobs(const std::string& state_dir);
// Returns the jobs that have files in one of the daemon's directories.
std::vector<BytesOfJob> DiskBytesOfJobs(const std::string& directory);

// Returns what the node's budget has left for the frames of `job`, those that
// it has included; nullopt: there is no such budget.
std::optional<uint64_t> NodeBudgetLeft(const std::string& state_dir,
                                       const v1::NvmeSettings& nvme,
                                       const std::string& job);
// Returns RESOURCE_EXHAUSTED, with the bytes needed and left and who has the
// others, when the job may not have so many bytes of frames.
absl::Status CheckNodeBudget(const std::string& state_dir,
                             const v1::NvmeSettings& nvme,
                             const std::string& job, uint64_t frames_bytes);
// Checks the bytes of a job in each directory against its limit likewise;
// `beside`: beside those that it has there.
absl::Status CheckDirectoryLimits(const v1::NvmeSettings& nvme,
                                  const std::string& job,
                                  absl::Span<const uint64_t> bytes,
                                  bool beside = false);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TIERS_NODE_BUDGET_H_
