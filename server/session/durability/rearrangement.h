#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_REARRANGEMENT_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_REARRANGEMENT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/job_context.h"
#include "server/session/job_description.h"
#include "storage/record_rewrite.h"
#include "storage/state_file.h"
#include "storage/state_store.h"
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
// Records that are split in another way *move* while the job is used: Begin(),
// Copy() and Switch(), of which only the first and the last keep steps waiting.
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
  // Removes what was made, unless it is the job's. Copy() has returned; the job
  // has the store that it had at Begin().
  ~Rearrangement();
  Rearrangement(const Rearrangement&) = delete;
  Rearrangement& operator=(const Rearrangement&) = delete;

  // The description that the job will have.
  const JobDescription& description() const { return next_; }

  // Makes the files. From then on what steps write goes to both arrangements.
  absl::Status Begin();
  // Copies what steps do not write. Called without the job's lock, between
  // Begin() and Switch(), while calls use the job.
  absl::Status Copy();
  // Has Copy(), and Switch() if it comes later, return an error.
  void Cancel(const absl::Status& why);
  // Makes the files, and a description that has them, the job's, in a time that
  // does not grow with the records. Returns the bytes of records that were
  // written. After an error the job is as it was, or, when it could not be
  // opened anew, works no more.
  absl::StatusOr<uint64_t> Switch();

  // Writes the records of a job that no rank uses, and whose store is made anew
  // next.
  absl::Status WriteAnew();
  // Notes that the description is the job's, so that the records are.
  void Adopt();

  // Says for the log what is written anew.
  std::string Describe(absl::string_view why) const;

 private:
  Rearrangement(JobContext* job, JobDescription next);
  absl::Status Make();
  // Awaits the last commit, which no other follows before the next pass, and
  // has the target say what it is as the job's next description has it.
  absl::Status DescribeCommit();
  absl::StatusOr<std::string> TextOfCommit() const;
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
  storage::StateStore* store_ = nullptr;  // once the move has begun
  bool is_adopted_ = false;
};

// Says in record_rewrite how far the job's records have been written anew, and
// in open_load how fast, and how long it will take. Waits for no disk.
void DescribeRewrite(const JobContext& job, v1::Job* described);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_REARRANGEMENT_H_
