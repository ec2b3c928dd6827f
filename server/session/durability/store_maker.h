#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_STORE_MAKER_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_STORE_MAKER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/session/job_context.h"
#include "server/session/job_description.h"
#include "storage/durable_commit.h"
#include "storage/state_store.h"
#include "storage/swap_sizes.h"

// The one place of a job that knows which stores there are: what else needs one
// sees storage::StateStore, and values that are any store's.
namespace optstate::session {

// Returns what the records of such a job take in frames and on disk.
storage::SwapSizes SwapSizesOf(const JobContext& job,
                               const JobDescription& description);

// Returns the elements of a sub-group of such a job.
uint64_t SubGroupElements(const JobContext& job,
                          const JobDescription& description);

// Returns the bytes that the job's engine keeps for parameters on disk; see
// job_storage.h for errors.
absl::StatusOr<uint64_t> ParameterCacheBytesOf(
    const JobContext& job, const JobDescription& description);
absl::StatusOr<uint64_t> ParameterCacheBytesOf(
    const v1::DaemonConfig& config, const JobDescription& description);

// Returns the bytes of all frames that the job's frame table was made for; 0:
// it was not made.
uint64_t FrameBytesOfTable(const JobContext& job);

// Makes the store of the job's present shape over its files. `restored`: the
// commit from which the job is made anew, or null. FAILED_PRECONDITION: this
// daemon lacks the job's directories; other errors are those of the files.
absl::StatusOr<std::unique_ptr<storage::StateStore>> MakeStore(
    JobContext* job, const storage::DurableCommit* restored);

// Reads the newest durable commit in the job's directories. NOT_FOUND: there is
// none; other errors are those of the disk.
absl::StatusOr<storage::DurableCommit> ReadDurableCommit(
    const JobContext& job, const std::vector<std::string>& directories);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_STORE_MAKER_H_
