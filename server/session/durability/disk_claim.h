#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_DISK_CLAIM_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_DISK_CLAIM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace optstate::session {

// A job, as it takes its folders on disks (storage/disk_folder.h), in their
// order.
struct DiskClaim {
  uint64_t incarnation = 0;
  uint32_t owner = 0;
  std::string job_directory;  // where the rest of its state is
  bool is_new = false;        // it has no records yet
  // By folder, the device of its directory; empty, or missing: it has none.
  std::vector<std::string> devices = {};
  // The folders before this one are the job's and stay as they are; those from
  // it on are to become the job's too (with is_new).
  uint32_t first = 0;
};

// Compares what the folders say with each other and with `incarnation`, if it
// is given. Folders that say nothing are of a former build, or not there.
// `count`: the job has the first so many of them, whatever they say, because an
// engine may have died while the number changed; 0: as many as the first one
// says. FAILED_PRECONDITION: one of those is of another job, there are fewer
// than the first one says, or they are in another order; the message has number
// and order. Folders behind those whose number the job does not have are left
// of a rearrangement, and in nobody's way.
absl::Status CheckDiskIdentities(const std::vector<std::string>& folders,
                                 std::optional<uint64_t> incarnation,
                                 uint32_t count);

// Checks that the durable job of the first folder is of this owner.
// PERMISSION_DENIED: it is not. FAILED_PRECONDITION: the folder does not say.
absl::Status CheckDiskOwner(const std::string& folder, uint32_t owner);

// Checks that the folders are this job's, before it writes anything; then makes
// them, for the daemon's user alone, with the job's owner, and who else may use
// it (storage/access_file.h), in the first and an identity in each. A job of a
// former build gets identities. Errors as above; FAILED_PRECONDITION also when
// a new job would overwrite another job's records; DATA_LOSS: a folder of a job
// that exists lacks its records.
absl::Status ClaimDiskFolders(const std::vector<std::string>& folders,
                              const DiskClaim& claim);

// Removes the folders of this incarnation, with all that is in them, after the
// job could not be made, or was never durable. Nullopt: those of a former
// build.
void RemoveDiskFolders(const std::vector<std::string>& folders,
                       std::optional<uint64_t> incarnation);

// Where the records of a job lie, as opposed to where a rearrangement of them
// would have had them, or did before (Rearrangement).
struct OwnArrangement {
  std::vector<std::string> folders;  // in all directories of the daemon
  uint32_t count = 0;                // of them the job has so many, the first
  uint32_t number = 0;               // of the arrangement
  uint64_t incarnation = 0;
};

// Returns the paths of what is there, of the job, of another arrangement:
// records, extents, commits, and whole folders that the job does not have.
std::vector<std::string> FindOtherArrangements(const OwnArrangement& own);

// Removes these, but for files of records and commits, which are removed by
// their store. What is still there afterwards, of the store's too, is an error
// in the log, and stays until the next engine.
void RemoveOtherArrangements(const OwnArrangement& own);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_DISK_CLAIM_H_
