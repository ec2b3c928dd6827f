#ifndef OPTSTATE_SERVER_SESSION_JOB_REGISTRAR_H_
#define OPTSTATE_SERVER_SESSION_JOB_REGISTRAR_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/types.pb.h"
#include "server/session/durability/rearrangement.h"
#include "server/session/job_context.h"
#include "server/session/job_description.h"
#include "server/session/job_shape.h"
#include "server/session/job_types.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/state_lock.h"
#include "server/session/steps/speculator.h"
#include "server/session/steps/step_decider.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/load_state.h"
#include "storage/durable_commit.h"
#include "storage/host_tier.h"

namespace optstate::session {

// Creates a job, changes its shape, and gives the rooms the sizes of the
// present one.
//
// Threads: not thread-safe; the job's lock guards it.
class JobRegistrar {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    StepDecider* decider;
    Speculator* speculator;
    LoadState* load;
    StateLock* state_lock;
  };
  explicit JobRegistrar(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        decider_(*rooms.decider),
        speculator_(*rooms.speculator),
        load_(*rooms.load),
        state_lock_(*rooms.state_lock) {}

  // See Job::Register. The description is that of the spec.
  absl::StatusOr<RegisterResult> Register(const RegisterSpec& spec,
                                          JobDescription description);
  absl::Status AdmitShape(const JobDescription& description) const;
  // Makes this the job's shape, whose files are open. `restored`: the commit
  // from which the job is made anew, or null.
  absl::Status UseShape(std::unique_ptr<JobShape> shape,
                        const storage::DurableCommit* restored = nullptr);

 private:
  storage::HostTier::StepFileBytes StepFilesOf(
      const JobDescription& description) const;
  absl::Status AdmitFrames(uint64_t bytes) const;
  absl::Status Create(const RegisterSpec& spec, JobDescription description);
  absl::Status RegisterAgain(const RegisterSpec& spec,
                             JobDescription description);
  absl::Status CheckScalerStays(const JobDescription& description) const;
  absl::Status Reshape(JobDescription description);
  absl::StatusOr<std::unique_ptr<Rearrangement>> WriteRecordsAnew(
      const JobDescription& next);
  absl::Status LoseShape(const absl::Status& why);
  void StartScaling(const std::optional<v1::LossScaler>& former,
                    const std::optional<v1::LossScalerState>& state);
  absl::Status MakeScheduler(const storage::DurableCommit* restored = nullptr);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  StepDecider& decider_;
  Speculator& speculator_;
  LoadState& load_;
  StateLock& state_lock_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_REGISTRAR_H_
