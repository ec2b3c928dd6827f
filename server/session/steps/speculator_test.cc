// Tests failures inside a speculation: they fail the job, and leave no rank
// waiting. Records in memory that the CPU updates cannot fail so.

#include "server/session/steps/speculator.h"

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/executors/fake_update_executor.h"
#include "server/session/job_lock.h"
#include "server/session/testing/room_fixture.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Records the answers to a rank.
class Listener final : public SessionListener {
 public:
  void OnStepDone(uint64_t request_id, const absl::Status& status,
                  const StepOutcome& /*outcome*/) override {
    requests_.push_back(request_id);
    status_ = status;
  }
  void OnNotice(absl::string_view /*text*/) override {}

  std::vector<uint64_t> requests_;
  absl::Status status_;
};

// A store whose records cannot be had.
class LostStore final : public storage::StateStore {
 public:
  explicit LostStore(storage::StateStore* store)
      : storage::StateStore(&store->layout(), kTileElements, {}) {}
  bool is_resident() const override { return false; }
  absl::Status status() const override { return absl::OkStatus(); }
  absl::StatusOr<Pin> PinRecord(size_t, Access) override {
    return absl::DataLossError("a bad disk");
  }
  absl::StatusOr<size_t> BeginPass(absl::Span<const uint8_t>) override {
    return absl::DataLossError("a bad disk");
  }
  absl::StatusOr<Pin> PinOfPass(size_t) override {
    return absl::DataLossError("a bad disk");
  }
};

RegisterSpec Speculative() {
  RegisterSpec spec;
  LayoutSpec layout;
  layout.groups.resize(1);
  for (const char* name : {"a", "b"}) {
    ParameterSpec parameter;
    parameter.name = name;
    parameter.shape = {3};
    parameter.numel = 3;
    layout.parameters.push_back(parameter);
  }
  spec.layout = *Layout::Make(layout);
  spec.world_size = 2;
  spec.local_world_size = 2;
  spec.host_id = "host";
  spec.speculative = true;
  return spec;
}

class SpeculatorTest : public RoomFixture {
 protected:
  SpeculatorTest() : RoomFixture(Speculative()) {
    commit_.step = 1;
    commit_.groups = groups_;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      AttachSpec spec;
      spec.rank = rank;
      spec.listener = &listeners_[rank];
      ranks_.Attach(spec);
      ranks_.gradient_area(rank) =
          reinterpret_cast<const std::byte*>(gradients_.data());
      const RankPartition& partition = job_.shape->partitions[rank];
      for (size_t i = 0; i < partition.pieces.size(); ++i) {
        step_.open_step.NoteStaged(rank, i, 0);
      }
    }
  }
  // Puts a scheduler of its own in the job's place.
  void MakeScheduler(storage::StateStore* store,
                     scheduler::UpdateExecutor* executor) {
    scheduler::StepScheduler::Options options;
    options.store = store;
    options.recovery = job_.tier->recovery();
    options.control = job_.tier->control();
    options.undo = job_.tier->undo();
    options.redo = job_.tier->redo();
    options.speculation = job_.tier->speculation();
    options.pool = &job_.pool;
    options.executor = executor;
    auto scheduler = scheduler::StepScheduler::Create(options);
    ASSERT_TRUE(scheduler.ok()) << scheduler.status();
    job_.scheduler = *std::move(scheduler);
    job_.scheduler->SetPartitions(job_.shape->partitions, false);
  }
  // Says that something of the open step was begun.
  void MarkSpeculated() { job_.tier->control()->step_speculated.store(1); }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(1, AdamHyperparams());
  const std::array<float, 8> gradients_ = {1, 1, 1, 1, 1, 1, 1, 1};
  CommitSpec commit_;
  std::array<Listener, 2> listeners_;
  scheduler::WorkerUndo undo_;
};

TEST_F(SpeculatorTest, ARankThatWaitsIsAnsweredWhenItsStepCannotBeBegun) {
  scheduler::FakeUpdateExecutor executor(&undo_, 1);
  executor.FailAfter(0, absl::UnavailableError("a lost device"));
  MakeScheduler(job_.store.get(), &executor);
  JobCall lock(&job_.lock);
  step_.open_step.NoteCommit(0, 7, commit_);
  speculator_.Speculate(0);
  EXPECT_THAT(job_.failure.message(), HasSubstr("a lost device"));
  EXPECT_THAT(listeners_[0].requests_, ElementsAre(7));
  EXPECT_EQ(listeners_[0].status_, job_.failure);
  EXPECT_FALSE(step_.open_step.commit(0).committed);
  EXPECT_THAT(listeners_[1].requests_, ElementsAre());
}

// The ranks that wait for a commit or for the end of a micro-step are answered,
// and only once.
TEST_F(SpeculatorTest, RanksThatWaitAreAnsweredWhenItCannotBeRolledBack) {
  LostStore store(job_.store.get());
  MakeScheduler(&store, nullptr);
  MarkSpeculated();
  JobCall lock(&job_.lock);
  step_.open_step.NoteCommit(0, 7, commit_);
  ranks_.session(1).ending = 8;
  EXPECT_FALSE(speculator_.RollBackSpeculation().ok());
  EXPECT_THAT(job_.failure.message(), HasSubstr("a bad disk"));
  EXPECT_THAT(listeners_[0].requests_, ElementsAre(7));
  EXPECT_THAT(listeners_[1].requests_, ElementsAre(8));
  EXPECT_EQ(listeners_[1].status_, job_.failure);
  // A failed job's files are the next engine's.
  EXPECT_TRUE(speculator_.RollBackSpeculation().ok());
  EXPECT_THAT(listeners_[0].requests_, ElementsAre(7));
  EXPECT_EQ(job_.tier->control()->step_speculated.load(), 1);
  MakeScheduler(job_.store.get(), nullptr);  // the former one's store ends
}

// A decided step is finished with the commit that it was begun with, and runs
// in flight are the update's.
TEST_F(SpeculatorTest, ADecidedStepIsNotRolledBack) {
  MarkSpeculated();
  storage::ControlFile& control = *job_.tier->control();
  control.step_in_progress.store(1);
  auto* const undo =
      reinterpret_cast<scheduler::WorkerUndo*>(job_.tier->undo().data());
  undo->Begin(scheduler::UndoKind::kUpdate, 0, 1);
  JobCall lock(&job_.lock);
  EXPECT_TRUE(speculator_.RollBackSpeculation().ok());
  EXPECT_EQ(control.step_speculated.load(), 1);
  EXPECT_EQ(undo->kind.load(),
            static_cast<uint64_t>(scheduler::UndoKind::kUpdate));
  // A load anew forgets it: nothing puts old values over the loaded ones.
  EXPECT_TRUE(job_.scheduler->ForgetStep(/*is_whole=*/true).ok());
  EXPECT_EQ(control.step_speculated.load(), 0);
}

}  // namespace
}  // namespace optstate::session
