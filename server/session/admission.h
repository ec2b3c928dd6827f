#ifndef OPTSTATE_SERVER_SESSION_ADMISSION_H_
#define OPTSTATE_SERVER_SESSION_ADMISSION_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/config.pb.h"
#include "proto/types/unique_fd.h"
#include "server/access/quotas.h"

namespace optstate::session {

// The resources that a job needs when it is created or grows.
struct AdmissionRequest {
  std::string directory;         // of the job
  std::string state_dir;         // of all jobs; empty: only this one
  uint64_t job_state_bytes = 0;  // the files when all is done
  uint64_t new_state_bytes = 0;  // the part not there yet
  uint64_t table_bytes = 0;  // of the engine's own memory: tables, workspace
  uid_t uid = 0;             // owner of the job
  v1::Limits limits;
  access::Quotas::All quotas = {};  // of all users and groups
};

// A lock held from the check to the reservation, so that two jobs that start at
// once are not both promised the same bytes. It is released when destroyed or
// when the process dies. Engines of one state directory wait for each other.
class AdmissionLock {
 public:
  static absl::StatusOr<AdmissionLock> Take(const std::string& state_dir);

 private:
  explicit AdmissionLock(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

// Returns RESOURCE_EXHAUSTED, saying how many bytes are needed and left and
// which setting would help, when the request does not fit the job's limit, its
// user's limit or quota, the quota of a group that the user is in, the limit of
// all jobs, the file system (or its inodes) or the memory. Users other than
// root and the daemon's own leave those two a part of each
// (limits.operator_reserve_percent). This is a check, not a reservation.
absl::Status Admit(const AdmissionRequest& request);

// Returns the bytes that Admit would let all jobs of the directory take in
// addition, ignoring the limit of each job.
absl::StatusOr<uint64_t> StateBytesLeft(const std::string& state_dir,
                                        const v1::Limits& limits);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_ADMISSION_H_
