#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_JOB_DURABILITY_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_JOB_DURABILITY_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/job_context.h"

namespace optstate::session {

// Which steps of a job are durable on disk, and when the next one is to be.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while a
// commit is on its way to the disk.
class JobDurability {
 public:
  // The arguments must outlive this object.
  explicit JobDurability(JobContext* job) : job_(*job) {}

  // Gives the job as many frames as its description has room for. Frames that
  // are given up are written to disk first; one pass over them. An error of the
  // disk is the store's, after which it works no more; after another one the
  // job has the frames that it had.
  absl::Status FitFrames();

  // Makes the present step durable if it is the turn of this one: with
  // durability "step" before this returns, else while training goes on.
  absl::Status MakeDurableIfDue(bool is_load);
  // Makes the present step of a durable job durable before this returns,
  // whatever its durability is. Nothing for one without a whole state.
  absl::Status MakeDurableNow();
  // Makes durable what a former engine had recorded and not answered: the rank
  // that asks for it again is answered at once. That is a step with durability
  // "step", and a load with any.
  absl::Status AdoptCommit();
  // Makes the last step durable at an orderly end, so that none is lost when
  // the machine is switched off next. `loading`: a load is under way.
  void CommitFinally(bool loading);
  void DescribeDisk(v1::DiskState* disk) const;
  // DATA_LOSS: the job's files in memory are older than what is durable on
  // disk.
  absl::Status CheckMemoryIsNewest() const;

 private:
  // Says what of the present state the last durable commit has.
  struct Durable {
    bool step = false;   // all of the committed step
    bool loads = false;  // every load that was finished
  };
  Durable WhatIsDurable() const;
  bool IsCommitDue() const;
  absl::Status ChangeFrames(uint64_t bytes, uint64_t frame_bytes);
  // waits: until the commit is on disk.
  absl::Status MakeDurable(bool waits);
  // Says whether each commit is on disk before the call that caused it is
  // answered.
  bool WaitsForCommits() const;

  JobContext& job_;
  absl::Time commit_requested_at_ = absl::InfinitePast();
  // The text of the last commit: the next one needs as much room.
  std::string commit_text_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_JOB_DURABILITY_H_
