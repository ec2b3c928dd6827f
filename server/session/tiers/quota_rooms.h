#ifndef OPTSTATE_SERVER_SESSION_TIERS_QUOTA_ROOMS_H_
#define OPTSTATE_SERVER_SESSION_TIERS_QUOTA_ROOMS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "optstate/v1/config.pb.h"
#include "server/access/quotas.h"

// Bytes that the quotas of a job's owner, and of the groups that the owner is
// in, leave. What jobs have is read from their files, so that quotas hold
// over engines and daemons; a caller that adds to it holds the AdmissionLock.
// Errors beside those that are named: UNAVAILABLE, the users or groups of
// quotas cannot be looked up just now.
namespace optstate::session {

// The bytes that one quota, or the limit of all users, leaves.
struct QuotaRoom {
  std::string what;  // "quota of user ada: state_bytes_max is 4096 bytes"
  uint64_t bytes_left = 0;
  std::string advice;
};

// A job as its quotas see it. What it points to outlives it.
struct OwnedJob {
  const v1::DaemonConfig* config = nullptr;
  std::string state_dir;
  uid_t owner = 0;
  std::string name;
};

// Returns what is left for the state of jobs of `owner`, beside that of all its
// jobs.
absl::StatusOr<std::vector<QuotaRoom>> StateRooms(
    const v1::Limits& limits, const access::Quotas::All& quotas,
    const std::string& state_dir, uid_t owner);

// Returns RESOURCE_EXHAUSTED, with the bytes needed and left, when the job may
// not have so many bytes of frames in all.
absl::Status CheckFramesQuotas(const OwnedJob& job, uint64_t frames_bytes);
// Checks the bytes of a job in all directories likewise; `beside`: beside those
// that it has there.
absl::Status CheckDiskQuotas(const OwnedJob& job,
                             absl::Span<const uint64_t> bytes,
                             bool beside = false);

// Returns what users' jobs have, but for the job `except`.
std::map<uid_t, uint64_t> FramesByOwner(const std::string& state_dir,
                                        const std::string& except = "");
std::map<uid_t, uint64_t> DiskBytesByOwner(const std::string& state_dir,
                                           const v1::NvmeSettings& nvme,
                                           const std::string& except = "");

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TIERS_QUOTA_ROOMS_H_
