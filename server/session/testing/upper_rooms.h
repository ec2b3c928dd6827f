#ifndef OPTSTATE_SERVER_SESSION_TESTING_UPPER_ROOMS_H_
#define OPTSTATE_SERVER_SESSION_TESTING_UPPER_ROOMS_H_

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/scheduler/executors/fake_update_executor.h"
#include "server/scheduler/step_scheduler.h"
#include "server/scheduler/worker_undo.h"
#include "server/session/drain_gate.h"
#include "server/session/ranks/loss_notifier.h"
#include "server/session/recovery/job_recovery.h"
#include "server/session/recovery/recovered_gradients.h"
#include "server/session/steps/step_preparer.h"
#include "server/session/testing/recording_keeper.h"
#include "server/session/testing/step_rooms.h"
#include "server/session/transfer/load_applier.h"
#include "server/session/transfer/load_log_room.h"
#include "server/session/transfer/load_rounds.h"

namespace optstate::session {

// The rooms of losses, loads and recovery, above those of a step.
class UpperRooms : public StepRooms {
 public:
  explicit UpperRooms(Job::Options options)
      : StepRooms(std::move(options)),
        losses_({.job = &job_,
                 .ranks = &ranks_,
                 .step = &step_,
                 .sums = &sums_,
                 .stager = &stager_}),
        gate_(&job_, &ranks_, &step_, &load_),
        log_(&job_, &load_),
        rounds_(&job_, &ranks_, &load_, &log_),
        applier_({.job = &job_,
                  .load = &load_,
                  .log = &log_,
                  .rounds = &rounds_,
                  .durability = &durability_}),
        gradients_(&job_, &ranks_),
        recovery_({.job = &job_,
                   .ranks = &ranks_,
                   .step = &step_,
                   .sums = &sums_,
                   .stager = &stager_,
                   .speculator = &speculator_,
                   .committer = &committer_,
                   .gradients = &gradients_,
                   .applier = &applier_}),
        preparer_({.job = &job_,
                   .ranks = &ranks_,
                   .step = &step_,
                   .decider = &decider_,
                   .committer = &committer_,
                   .recovery = &recovery_}) {
    job_.options.keeper = &keeper_;
  }

  RecordingKeeper keeper_;
  LossNotifier losses_;
  DrainGate gate_;
  LoadLogRoom log_;
  LoadRounds rounds_;
  LoadApplier applier_;
  RecoveredGradients gradients_;
  JobRecovery recovery_;
  StepPreparer preparer_;
};

// An AttachedRoomTest with an executor that fails when the test wants it. Rooms
// that wait need the job's lock, which the fixture holds.
class UpperRoomFixture : public AttachedRoomTest<UpperRooms> {
 protected:
  explicit UpperRoomFixture(const RegisterSpec& spec = TwoRankSpec())
      : AttachedRoomTest(spec),
        executor_(
            reinterpret_cast<scheduler::WorkerUndo*>(job_.tier->undo().data()),
            /*seed=*/1) {
    scheduler::StepScheduler::Options options;
    options.store = job_.store.get();
    options.recovery = job_.tier->recovery();
    options.control = job_.tier->control();
    options.undo = job_.tier->undo();
    options.speculation = job_.tier->speculation();
    options.redo = job_.tier->redo();
    options.pool = &job_.pool;
    options.executor = &executor_;
    job_.scheduler = *scheduler::StepScheduler::Create(options);
    job_.scheduler->SetPartitions(job_.shape->partitions, job_.is_replicated());
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      keeper_.Keep(rank, kInstance + rank, 0, -1);
    }
  }

  // Leaves what an engine does that dies in the next step after this many of
  // its updates, one for each parameter: no rank is attached any more.
  void DieInStep(uint64_t updates) {
    absl::Span<const uint8_t> updated;
    const StepDecision decision = DecideStep(&updated);
    executor_.FailAfter(updates, absl::InternalError("dies"));
    JobCall lock(&job_.lock);
    EXPECT_FALSE(committer_.CommitDecision(decision, updated).ok());
    job_.failure = absl::OkStatus();
    ForgetSessions();
  }
  absl::Status Adopt() {
    JobCall lock(&job_.lock);
    return recovery_.AdoptStep();
  }

  scheduler::FakeUpdateExecutor executor_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_UPPER_ROOMS_H_
