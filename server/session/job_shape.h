#ifndef OPTSTATE_SERVER_SESSION_JOB_SHAPE_H_
#define OPTSTATE_SERVER_SESSION_JOB_SHAPE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/partition.h"
#include "server/session/job_description.h"
#include "storage/host_tier.h"

namespace optstate::session {

// A description and what follows from it; replaced as a whole.
struct JobShape {
  JobDescription description;
  std::string text;                       // of the description, serialized
  std::vector<RankPartition> partitions;  // by rank
};

// Returns what MakeRankPartition() returns where a rank cannot have a part.
absl::StatusOr<std::unique_ptr<JobShape>> MakeShape(JobDescription description);

// Returns the arrays of the job that lie in host memory.
storage::HostArrays HostArraysOf(const JobDescription& description);

// Returns the size of the file of what speculation overwrites; 0: the job is
// not speculated with.
uint64_t SpeculationBytes(const JobDescription& description);
// Returns UNIMPLEMENTED when a speculative job cannot be speculated with: its
// optimizer needs whole parameters, or its state is on a disk.
absl::Status CheckSpeculation(const JobDescription& description);

// Returns the bytes that an engine keeps beside the state, without constants
// and the layout itself: a peer's message of kilobytes can ask for gigabytes of
// them.
uint64_t TableBytes(const JobDescription& description);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_SHAPE_H_
