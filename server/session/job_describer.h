#ifndef OPTSTATE_SERVER_SESSION_JOB_DESCRIBER_H_
#define OPTSTATE_SERVER_SESSION_JOB_DESCRIBER_H_

#include <string>

#include "absl/status/statusor.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/durability/job_durability.h"
#include "server/session/job_context.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/state_lock.h"
#include "server/session/steps/speculator.h"
#include "server/session/steps/step_committer.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_state.h"

namespace optstate::session {

// Describes a job to operators. Reads only what no pass over the state changes,
// so that it needs no idle job.
//
// Threads: not thread-safe; the job's lock guards it.
class JobDescriber {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    LoadState* load;
    Speculator* speculator;
    StepCommitter* committer;
    JobDurability* durability;
    StateLock* state_lock;
  };
  explicit JobDescriber(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        load_(*rooms.load),
        speculator_(*rooms.speculator),
        committer_(*rooms.committer),
        durability_(*rooms.durability),
        state_lock_(*rooms.state_lock) {}

  v1::Job Describe() const;
  absl::StatusOr<v1::ListParametersReply> ListParameters(
      const v1::ListParametersRequest& request) const;

 private:
  void DescribeState(v1::Job* job) const;
  std::string DescribeOpenStep() const;
  void DescribeSessions(v1::Job* job) const;

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  LoadState& load_;
  Speculator& speculator_;
  StepCommitter& committer_;
  JobDurability& durability_;
  StateLock& state_lock_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_DESCRIBER_H_
