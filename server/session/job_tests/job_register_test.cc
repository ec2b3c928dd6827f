// Tests of a job's creation, changes of its shape, and permission to attach.

#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_scheduler.h"
#include "server/session/testing/job_harness.h"
#include "server/session/testing/two_rank_job_fixture.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class JobRegisterTest : public TwoRankJobFixture {
 protected:
  absl::Status RegisterStatus(const RegisterSpec& spec) {
    return harness_.job().Register(spec).status();
  }
};

TEST_F(JobRegisterTest, TheFirstRankCreates) {
  const auto first = harness_.Register(0);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->created);
  EXPECT_EQ(first->committed_step, 0);
  EXPECT_EQ(first->phase, v1::JOB_PHASE_LOADING);
  EXPECT_EQ(first->layout_hash, harness_.layout().hash());
  const auto second = harness_.Register(1);
  ASSERT_TRUE(second.ok());
  EXPECT_FALSE(second->created);
  const v1::Job job = harness_.job().Describe();
  EXPECT_EQ(job.parameter_count(), 2);
  EXPECT_EQ(job.element_count(), 15000);
  ASSERT_EQ(job.arrays_size(), 9);
  // Arrays take whole pages.
  EXPECT_EQ(job.arrays(0).name(), "parameters");
  EXPECT_EQ(job.arrays(0).bytes(), 11 * 4096);
  // Only "b" has a master: "a" is float32.
  EXPECT_EQ(job.arrays(1).name(), "master");
  EXPECT_EQ(job.arrays(1).bytes(), 9000 * 4);
  EXPECT_EQ(job.arrays(2).name(), "exp_avg");
  EXPECT_EQ(job.arrays(2).bytes(), 16384 * 4);
  EXPECT_EQ(job.arrays(4).name(), "step");
  EXPECT_EQ(job.arrays(8).name(), "undo");
  EXPECT_EQ(job.arrays(8).bytes(),
            scheduler::StepScheduler::WorkerUndoBytes(2));
  EXPECT_EQ(job.state_bytes(),
            11 * 4096 + 9000 * 4 + 2 * 16384 * 4 + 4 * 4096 + 65536 +
                scheduler::StepScheduler::WorkerUndoBytes(2));
}

TEST_F(JobRegisterTest, NothingBeforeRegister) {
  EXPECT_EQ(harness_.job().layout().status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(harness_.job().partition(0).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(harness_.job().OpenParameters().status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(harness_.job().Attach({}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_EMPTY);
  harness_.job().Detach(0);
}

TEST_F(JobRegisterTest, SeveralMachinesAreUnimplemented) {
  RegisterSpec spec = harness_.SpecOf(0);
  spec.local_world_size = 1;
  EXPECT_EQ(RegisterStatus(spec).code(), absl::StatusCode::kUnimplemented);
  ASSERT_TRUE(harness_.Register(0).ok());
  ASSERT_TRUE(harness_.Attach(0).ok());
  spec = harness_.SpecOf(1);
  spec.host_id = "other";
  const absl::Status status = RegisterStatus(spec);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(status.message(), HasSubstr("\"other\""));
}

TEST_F(JobRegisterTest, ImpossibleRanksAreRefused) {
  RegisterSpec spec = harness_.SpecOf(2);
  EXPECT_EQ(RegisterStatus(spec).code(), absl::StatusCode::kInvalidArgument);
  spec = harness_.SpecOf(0);
  spec.world_size = spec.local_world_size = 0;
  EXPECT_EQ(RegisterStatus(spec).code(), absl::StatusCode::kInvalidArgument);
  spec.world_size = spec.local_world_size = kWorldSizeMax + 1;
  EXPECT_EQ(RegisterStatus(spec).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(JobRegisterTest, AnotherLayoutIsRefused) {
  ASSERT_TRUE(harness_.Register(0).ok());
  LayoutSpec other = SmallLayout();
  other.parameters[1].name = "renamed";
  harness_.SetLayout(other);
  const absl::Status renamed = harness_.Register(0).status();
  EXPECT_EQ(renamed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(renamed.message(), HasSubstr("renamed"));
  harness_.SetLayout(ExtendedLayout());
  EXPECT_EQ(harness_.Register(0).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

// No parameter has a separate master.
TEST_F(JobRegisterTest, AFloat32JobTakesAnotherMasterFormat) {
  LayoutSpec layout;
  layout.groups = {{}};
  layout.parameters = {MakeParameter("a", 6000)};
  harness_.SetLayout(layout);
  harness_.Start(harness_.RandomTensors(1));
  harness_.Step(1, harness_.RandomTensors(2), CommitOf(1, groups_));
  const std::string state = harness_.StateBytes();
  layout.master_format = MasterFormat::kSplit;
  harness_.SetLayout(layout);
  EXPECT_THAT(harness_.Register(0).status().message(),
              HasSubstr("when all ranks have detached"));
  harness_.DetachAll();
  harness_.AttachAll();
  EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_READY);
  EXPECT_TRUE(harness_.StateBytes() == state);
  harness_.Step(2, harness_.RandomTensors(3), CommitOf(2, groups_));
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  harness_.AttachAll();
  // Parameters that do have a master may come with the new format.
  harness_.DetachAll();
  layout.groups.push_back({});
  layout.parameters.push_back(MakeParameter("b", 5000, 1, DType::kBFloat16));
  harness_.SetLayout(layout);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto extended = harness_.Register(rank, /*extend=*/true);
    ASSERT_TRUE(extended.ok()) << extended.status();
    ASSERT_TRUE(harness_.Attach(rank).ok());
  }
  harness_.LoadMasters(harness_.RandomTensors(4));
  EXPECT_TRUE(harness_.FinishAll().status.ok());
}

TEST_F(JobRegisterTest, SettingsStayWhileRanksAreAttached) {
  ASSERT_TRUE(harness_.Register(0).ok());
  ASSERT_TRUE(harness_.Attach(0).ok());
  struct Case {
    RegisterSpec spec;
    const char* text;
  };
  std::vector<Case> cases(4, {harness_.SpecOf(1), ""});
  cases[0].spec.world_size = cases[0].spec.local_world_size = 3;
  cases[0].text = "world_size 2, this one has 3";
  cases[1].spec.partition = PartitionMode::kContiguous;
  cases[1].text = "partition greedy, this one has contiguous";
  cases[2].spec.accumulate = true;
  cases[2].text = "accumulate false, this one has true";
  cases[3].spec.ephemeral = true;
  cases[3].text = "ephemeral false, this one has true";
  for (const Case& changed : cases) {
    const absl::Status status = RegisterStatus(changed.spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr(changed.text));
  }
  harness_.Detach(0);
  for (const Case& changed : cases) {
    EXPECT_TRUE(RegisterStatus(changed.spec).ok());
  }
}

TEST_F(JobRegisterTest, ARankAttachesOnce) {
  harness_.AttachAll();
  const absl::Status again = harness_.Attach(1).status();
  EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(again.message(), HasSubstr("process 1001"));
  harness_.Detach(1);
  harness_.Detach(1);
  ASSERT_TRUE(harness_.Register(1).ok());
  EXPECT_TRUE(harness_.Attach(1).ok());
}

TEST_F(JobRegisterTest, BadAttachesAreRefused) {
  const auto registered = harness_.Register(0);
  ASSERT_TRUE(registered.ok()) << registered.status();
  RecordingListener listener;
  std::vector<std::byte> area(1 << 20);
  AttachSpec good;
  good.layout_hash = harness_.layout().hash();
  good.shape = registered->shape;
  good.gradient_area = area.data();
  good.gradient_area_bytes = area.size();
  good.listener = &listener;
  const auto code = [&](const AttachSpec& spec) {
    return harness_.job().Attach(spec).status().code();
  };
  AttachSpec spec = good;
  spec.rank = 2;
  EXPECT_EQ(code(spec), absl::StatusCode::kInvalidArgument);
  spec = good;
  spec.layout_hash = "?";
  EXPECT_EQ(code(spec), absl::StatusCode::kFailedPrecondition);
  spec = good;
  spec.gradient_area = nullptr;
  EXPECT_EQ(code(spec), absl::StatusCode::kInvalidArgument);
  spec = good;
  spec.gradient_area_bytes = 1;
  EXPECT_EQ(code(spec), absl::StatusCode::kFailedPrecondition);
  // A rank that registered before the shape changed does not know its part,
  // even if the layout is the same and its gradients would have room.
  RegisterSpec one = harness_.SpecOf(1);
  const auto change = [&] {
    ASSERT_TRUE(harness_.job().Register(one).ok());
    EXPECT_EQ(code(good), absl::StatusCode::kFailedPrecondition);
    const auto again = harness_.job().Register(one);
    ASSERT_TRUE(again.ok()) << again.status();
    good.shape = again->shape;
  };
  one.partition = PartitionMode::kContiguous;
  change();
  one.world_size = one.local_world_size = 3;
  change();
  one.loss_scaler.emplace().set_init_scale(2);
  change();
  EXPECT_EQ(code(good), absl::StatusCode::kOk);
}

// A registration without the scaler would reset the current scale, and unscaled
// gradients would be divided by it.
TEST_F(JobRegisterTest, ALossScalerIsNotForgotten) {
  RegisterSpec with = harness_.SpecOf(0);
  with.world_size = with.local_world_size = 1;
  with.loss_scaler.emplace().set_init_scale(1024);
  with.loss_scaler->set_dynamic(true);
  with.loss_scaler->set_growth_factor(2);
  with.loss_scaler->set_backoff_factor(0.5);
  with.loss_scaler->set_growth_interval(10);
  with.loss_scaler->set_hysteresis(1);
  ASSERT_TRUE(harness_.job().Register(with).ok());
  RegisterSpec without = with;
  without.loss_scaler.reset();
  for (const bool reopened : {false, true}) {
    if (reopened) {
      harness_.Close();
      ASSERT_TRUE(harness_.Open().ok());
    }
    const absl::Status refused = RegisterStatus(without);
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(
        refused.message(),
        AllOf(HasSubstr("has a loss scaler, whose scale is 1024"),
              HasSubstr("loss_scaler="), HasSubstr("optctl delete job test")));
    // The scale is kept: another setting of the same scaler goes on at it.
    with.loss_scaler->set_growth_interval(reopened ? 30 : 20);
    const auto again = harness_.job().Register(with);
    ASSERT_TRUE(again.ok()) << again.status();
    AttachSpec spec = harness_.AttachSpecOf(0);
    spec.layout_hash = again->layout_hash;
    const auto attached = harness_.job().Attach(spec);
    ASSERT_TRUE(attached.ok()) << attached.status();
    EXPECT_EQ(attached->loss_scale, 1024);
    harness_.Detach(0);
  }
}

TEST_F(JobRegisterTest, WorldSizeAndPartitionMayChangeBetweenSessions) {
  JobHarness one(TwoRanks());
  one.Start(one.RandomTensors(1));
  harness_.Start(harness_.RandomTensors(1));
  uint64_t step = 0;
  for (const uint32_t world_size : {2, 1, 3}) {
    for (const PartitionMode mode :
         {PartitionMode::kGreedy, PartitionMode::kContiguous}) {
      harness_.DetachAll();
      harness_.setup().world_size = world_size;
      harness_.setup().partition = mode;
      harness_.AttachAll();
      ++step;
      const Tensors gradients = one.RandomTensors(100 + step);
      one.Step(step, gradients, CommitOf(step, groups_));
      harness_.Step(step, gradients, CommitOf(step, groups_));
      EXPECT_EQ(harness_.StateBytes(), one.StateBytes());
    }
  }
}

TEST_F(JobRegisterTest, ExtensionKeepsTheStateAndAsksForTheNewMasters) {
  harness_.Start(harness_.RandomTensors(1));
  harness_.Step(1, harness_.RandomTensors(2), CommitOf(1, groups_));
  const auto master = harness_.Fetch(v1::STATE_ARRAY_MASTER, 1);
  const auto moment = harness_.Fetch(v1::STATE_ARRAY_STATE_0, 1);
  const auto parameter = harness_.Parameter(1);
  harness_.SetLayout(ExtendedLayout());
  const absl::Status attached = harness_.Register(0, /*extend=*/true).status();
  EXPECT_EQ(attached.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(attached.message(), HasSubstr("when all ranks have detached"));
  harness_.DetachAll();
  const auto extended = harness_.Register(0, /*extend=*/true);
  ASSERT_TRUE(extended.ok()) << extended.status();
  EXPECT_EQ(extended->phase, v1::JOB_PHASE_LOADING);
  EXPECT_EQ(extended->committed_step, 1);
  for (int restart = 0; restart < 2; ++restart) {
    EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_LOADING);
    EXPECT_EQ(harness_.Parameter(1), parameter);
    harness_.Close();
    ASSERT_TRUE(harness_.Open().ok());
  }
  harness_.AttachAll();
  // Only the new parameter has to be loaded.
  const std::vector<float> ones(5000, 1.0f);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.job().BeginLoad(rank).ok());
  }
  harness_.job().FinishLoad(1, 900, {});  // "c" goes to the rank with less
  ASSERT_NE(harness_.AnswerTo(1, 900), nullptr);
  EXPECT_THAT(harness_.AnswerTo(1, 900)->status.message(),
              HasSubstr("\"c\" were not loaded"));
  ASSERT_TRUE(harness_.LoadMaster(1, 2, ones).ok());
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_MASTER, 1), master);
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_STATE_0, 1), moment);
  EXPECT_EQ(harness_.Parameter(2), ones);
  EXPECT_THAT(harness_.Fetch(v1::STATE_ARRAY_STATE_2, 2), Each(0.0f));
  const std::vector<Hyperparams> two_groups(2, AdamHyperparams());
  harness_.Step(2, harness_.RandomTensors(3), CommitOf(2, two_groups));
  EXPECT_EQ(harness_.StepCounts(), (std::vector<int64_t>{2, 2, 1}));
}

TEST_F(JobRegisterTest, ALoadThatBreaksOffAfterAnExtensionKeepsTheRest) {
  harness_.Start(harness_.RandomTensors(1));
  const auto master = harness_.Fetch(v1::STATE_ARRAY_MASTER, 1);
  harness_.DetachAll();
  harness_.SetLayout(ExtendedLayout());
  ASSERT_TRUE(harness_.Register(0, /*extend=*/true).ok());
  const std::vector<float> ones(5000, 1.0f);
  for (int attempt = 0; attempt < 2; ++attempt) {
    harness_.AttachAll();
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(harness_.job().BeginLoad(rank).ok());
      ASSERT_TRUE(harness_.LoadMaster(rank, 2, ones).ok());
    }
    if (attempt == 0) harness_.DetachAll();
  }
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_MASTER, 1), master);
}

TEST_F(JobRegisterTest, AJobOfAnyOptimizerThatHasNoKernelIsRefusedWhole) {
  // All kernels exist for Adam and AdamW in every dtype: register them all.
  LayoutSpec spec;
  spec.optimizer = OptimizerKind::kAdam;
  spec.groups = {{}, {.options = adam::kAmsgrad}};
  for (const uint32_t group : {0, 1}) {
    for (const DType dtype :
         {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const DType gradient :
           {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        spec.parameters.push_back(
            MakeParameter(absl::StrCat("p", spec.parameters.size()), 10, group,
                          dtype, gradient));
      }
    }
  }
  harness_.SetLayout(spec);
  EXPECT_TRUE(harness_.Register(0).ok());
}

// A session comes back and finds that others have changed the job.
TEST_F(JobRegisterTest, OneThatComesBackChangesNothing) {
  harness_.AttachAll();
  harness_.DetachAll();
  RegisterSpec spec = harness_.SpecOf(0);
  spec.unchanged = true;
  EXPECT_TRUE(harness_.job().Register(spec).ok());
  spec.ephemeral = true;
  EXPECT_EQ(harness_.job().Register(spec).status().code(),
            absl::StatusCode::kFailedPrecondition);
  spec.unchanged = false;
  EXPECT_TRUE(harness_.job().Register(spec).ok());
  // An unchanged registration does not create a job.
  JobHarness empty(harness_.setup());
  spec.unchanged = true;
  EXPECT_EQ(empty.job().Register(spec).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(empty.job().Describe().phase(), v1::JOB_PHASE_EMPTY);
}

TEST_F(JobRegisterTest, AnEphemeralJobIsFinishedWithItsLastSession) {
  harness_.setup().ephemeral = true;
  harness_.AttachAll();
  EXPECT_FALSE(harness_.job().finished());
  harness_.Detach(0);
  EXPECT_FALSE(harness_.job().finished());
  harness_.Detach(1);
  EXPECT_TRUE(harness_.job().finished());
  harness_.setup().ephemeral = false;
  harness_.AttachAll();
  harness_.DetachAll();
  EXPECT_FALSE(harness_.job().finished());
}

// Ranks of the previous engine come back, or their processes end.
TEST_F(JobRegisterTest, AnEphemeralJobIsFinishedWithTheLastThatIsAwaited) {
  harness_.setup().ephemeral = true;
  harness_.setup().client_instance = 50;
  harness_.AttachAll();
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_FALSE(harness_.job().finished());
  harness_.job().GiveUp({.rank = 0, .client_instance = 50});
  EXPECT_FALSE(harness_.job().finished());
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  harness_.job().GiveUp({.rank = 1, .client_instance = 51});
  EXPECT_FALSE(harness_.job().finished()) << "it is back";
  harness_.Detach(1);
  EXPECT_TRUE(harness_.job().finished());
}

}  // namespace
}  // namespace optstate::session
