#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_REARRANGEMENT_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_REARRANGEMENT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/job_context.h"
#include "server/session/job_description.h"
#include "storage/record_rewrite.h"
#include "storage/state_file.h"
#include "storage/swap_sizes.h"

namespace optstate::session {

// The records of a job, which are on disk, being written anew: split over its
// directories in another way, or for a layout that extends the job's.
//
// They are written to files of their own, beside those that the job has. One
// rename, that of the job's description (job.binpb) with the next number of an
// arrangement, makes them the job's; the engine that opens the job next, or
// this one, gives the others their names (`frame_table`, `commits`) and removes
// the former ones. After a loss of power `commits` alone says which records
// count, and either are whole until the others are removed. So whatever ends at
// any instruction, the job is as before or as after.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while
// records are written.
class Rearrangement {
 public:
  // Makes folders, extents and the table. Sets the number of `next`, the
  // description that the job will have. The job has a disk and works.
  // RESOURCE_EXHAUSTED: there is no room for two arrangements at once;
  // FAILED_PRECONDITION: a folder of another job is in the way. `job` outlives
  // this.
  static absl::StatusOr<std::unique_ptr<Rearrangement>> Prepare(
      JobContext* job, JobDescription next);
  // Removes what was made, unless it is the job's.
  ~Rearrangement();
  Rearrangement(const Rearrangement&) = delete;
  Rearrangement& operator=(const Rearrangement&) = delete;

  // The description that the job will have.
  const JobDescription& description() const { return next_; }

  // Says how much was written, and how long training waited for it.
  struct Written {
    uint64_t bytes = 0;
    absl::Duration elapsed;
  };

  // Writes the records and makes them, and the description, the job's, whose
  // layout is the same. After an error the job is as it was, or, when it could
  // not be opened anew, works no more.
  absl::StatusOr<Written> Switch();

  // Writes the records of a job that no rank uses, and whose store is made anew
  // next.
  absl::Status WriteAnew();
  // Notes that the description is the job's, so that the records are.
  void Adopt();

 private:
  Rearrangement(JobContext* job, JobDescription next);
  absl::Status Make();
  absl::StatusOr<std::string> TextOfCommit() const;
  // Makes the pass that writes the records, and says so in the log at its
  // beginning and its end.
  absl::StatusOr<Written> Write(
      absl::string_view why,
      absl::FunctionRef<absl::StatusOr<uint64_t>()> write);
  // Removes what is not of this arrangement, for which the job has the first
  // `count` of the daemon's directories, and what of it is not the store's.
  void RemoveOthers(uint32_t count, uint32_t arrangement) const;

  JobContext& job_;
  JobDescription next_;
  std::string text_;                  // of the description
  std::vector<std::string> folders_;  // of the next arrangement
  uint32_t former_count_;             // of the job's folders
  storage::SwapSizes sizes_;
  std::optional<storage::StateFile> table_;
  storage::RewriteTarget target_;
  bool is_adopted_ = false;
};

// Says in record_rewrite how far the job's records have been written anew, and
// in open_load how fast, and how long it will take. Waits for no disk.
void DescribeRewrite(const JobContext& job, v1::Job* described);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_REARRANGEMENT_H_
