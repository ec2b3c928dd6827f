#include "server/session/job_registrar.h"

#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/scoped_file_limit.h"
#include "server/session/testing/step_rooms.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A job with a parameter "c", in a group of its own, beside those of
// TwoRankSpec().
RegisterSpec ExtendedSpec(RegisterSpec spec, int64_t numel = 3) {
  LayoutSpec layout;
  layout.groups.assign(spec.layout.groups().begin(),
                       spec.layout.groups().end());
  layout.groups.emplace_back();
  layout.parameters.assign(spec.layout.parameters().begin(),
                           spec.layout.parameters().end());
  ParameterSpec parameter;
  parameter.name = "c";
  parameter.shape = {numel};
  parameter.numel = numel;
  parameter.group = static_cast<uint32_t>(layout.groups.size()) - 1;
  layout.parameters.push_back(parameter);
  spec.layout = *Layout::Make(layout);
  spec.extend = true;
  return spec;
}

v1::LossScaler ScalerOf(double init_scale) {
  v1::LossScaler scaler;
  scaler.set_init_scale(init_scale);
  scaler.set_dynamic(true);
  scaler.set_growth_factor(2);
  scaler.set_backoff_factor(0.5);
  scaler.set_growth_interval(100);
  scaler.set_hysteresis(1);
  return scaler;
}

// No job is registered yet.
class NewJobTest : public RoomTest<LowerRooms> {
 protected:
  NewJobTest() : RoomTest(std::nullopt) {}
};

TEST_F(NewJobTest, TheFirstRankCreates) {
  RegisterSpec spec = TwoRanks();
  spec.unchanged = true;
  EXPECT_EQ(Register(spec).status().code(), absl::StatusCode::kNotFound);
  spec.unchanged = false;
  const auto first = Register(spec);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->created);
  EXPECT_EQ(first->phase, v1::JOB_PHASE_LOADING);
  EXPECT_EQ(first->storage.placement(), v1::PLACEMENT_HOST);
  EXPECT_NE(first->shape, 0u);
  const auto second = Register(spec);
  ASSERT_TRUE(second.ok());
  EXPECT_FALSE(second->created);
  EXPECT_EQ(second->shape, first->shape);
}

TEST_F(NewJobTest, AScalerBeginsWithWhatTheRankSays) {
  RegisterSpec spec = TwoRanks();
  spec.loss_scaler = ScalerOf(64);
  spec.loss_scaler_state.emplace().set_loss_scale(16);
  spec.loss_scaler_state->set_hysteresis_left(1);
  ASSERT_TRUE(Register(spec).ok());
  EXPECT_EQ(job_.record().loss_scale, 16);
}

TEST_F(NewJobTest, AStoreThatCannotBeMadeLeavesNothingBehind) {
  job_.options.config.mutable_nvme()->add_directories(directory_ + "/none/of");
  RegisterSpec spec = TwoRanks();
  spec.storage.set_placement(v1::PLACEMENT_NVME);
  EXPECT_FALSE(Register(spec).ok());
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_EMPTY);
  EXPECT_FALSE(job_.tier.has_value());
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/state"));
  spec.storage.clear_placement();
  EXPECT_TRUE(Register(spec).ok());
}

TEST_F(NewJobTest, AJobThatCouldNotBeOpenedIsNotMadeAnew) {
  job_.failure = absl::DataLossError("why");
  EXPECT_EQ(Register(TwoRanks()).status(), job_.failure);
}

// A job that is READY, and whose ranks are attached.
class JobRegistrarTest : public StepRoomFixture {
 protected:
  explicit JobRegistrarTest(const RegisterSpec& spec = TwoRankSpec())
      : StepRoomFixture(spec), spec_(spec) {}

  void DetachAll() {
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      ranks_.Leave(rank);
    }
  }

  RegisterSpec spec_;
};

TEST_F(JobRegistrarTest, TheShapeStaysWhileRanksAreAttached) {
  const uint64_t shape = job_.shape_number;
  spec_.partition = PartitionMode::kContiguous;
  EXPECT_EQ(Register(spec_).status().code(),
            absl::StatusCode::kFailedPrecondition);
  DetachAll();
  spec_.unchanged = true;
  EXPECT_EQ(Register(spec_).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(job_.shape_number, shape);
  spec_.unchanged = false;
  const auto changed = Register(spec_);
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(changed->shape, shape + 1);
  EXPECT_EQ(changed->phase, v1::JOB_PHASE_READY);
}

TEST_F(JobRegistrarTest, AnotherLayoutNeedsAnotherJob) {
  RegisterSpec extended = ExtendedSpec(spec_);
  extended.extend = false;
  EXPECT_THAT(Register(extended).status().message(),
              HasSubstr("use another name than \"test\" or delete the job"));
}

TEST_F(JobRegistrarTest, AnExtensionAsksForTheNewMasters) {
  DetachAll();
  const auto extended = Register(ExtendedSpec(spec_));
  ASSERT_TRUE(extended.ok()) << extended.status();
  EXPECT_EQ(extended->phase, v1::JOB_PHASE_LOADING);
  EXPECT_EQ(job_.record().load_required_from, 2u);
  // All rooms have the new sizes.
  EXPECT_EQ(job_.parameter_count(), 3u);
  EXPECT_EQ(decider_.gradient_norms().size(), 3u);
  EXPECT_FALSE(step_.open_step.IsWhole(2));
}

TEST_F(JobRegistrarTest, WhatASettingChangesIsStagedByNobody) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  DetachAll();
  ranks_.losses().Note(1, 1, /*in_open_step=*/true);
  spec_.ephemeral = true;
  ASSERT_TRUE(Register(spec_).ok());
  EXPECT_FALSE(step_.open_step.any());
  EXPECT_EQ(job_.rank_mark(0).step, 0u);
  EXPECT_EQ(ranks_.losses().state(1), LossState::kNone);
}

TEST_F(JobRegistrarTest, AStepThatIsBeingFinishedKeepsItsShape) {
  DetachAll();
  job_.recovery.emplace().record.committed_step = 1;
  spec_.ephemeral = true;
  EXPECT_EQ(Register(spec_).status().code(), absl::StatusCode::kUnavailable);
  job_.recovery.reset();
}

// The files are whole, and the next engine may have what this one lacks.
TEST_F(JobRegistrarTest, AShapeThatCannotBeUsedFailsTheJob) {
  DetachAll();
  spec_.ephemeral = true;
  absl::Status failed;
  {
    const ScopedFileLimit limit(0);
    failed = Register(ExtendedSpec(spec_, 1 << 16)).status();
  }
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(job_.phase(), v1::JOB_PHASE_READY) << "the files are as before";
  EXPECT_EQ(job_.parameter_count(), 2u);
  EXPECT_TRUE(Register(spec_).ok());
}

class ScaledRegistrarTest : public JobRegistrarTest {
 protected:
  static RegisterSpec Scaled() {
    RegisterSpec spec = TwoRankSpec();
    spec.loss_scaler = ScalerOf(64);
    return spec;
  }
  ScaledRegistrarTest() : JobRegistrarTest(Scaled()) { DetachAll(); }
};

TEST_F(ScaledRegistrarTest, TheScalerIsNotForgotten) {
  EXPECT_EQ(job_.record().loss_scale, 64);
  spec_.loss_scaler.reset();
  const absl::Status refused = Register(spec_).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(),
              AllOf(HasSubstr("whose scale is 64"), HasSubstr("loss_scaler=")));
  spec_.loss_scaler = ScalerOf(32);
  ASSERT_TRUE(Register(spec_).ok());
  EXPECT_EQ(job_.record().loss_scale, 32);
  spec_.ephemeral = true;
  ASSERT_TRUE(Register(spec_).ok());
  EXPECT_EQ(job_.record().loss_scale, 32) << "it has not changed";
}

// A job that accumulates: gradients that ranks have staged are in its files.
class AccumulatingRegistrarTest : public JobRegistrarTest {
 protected:
  static RegisterSpec Accumulating() {
    RegisterSpec spec = TwoRankSpec();
    spec.accumulate = true;
    return spec;
  }
  AccumulatingRegistrarTest() : JobRegistrarTest(Accumulating()) {}
};

// A rank that returns must not be told that gradients are staged whose marks
// are gone.
TEST_F(AccumulatingRegistrarTest, NothingIsStagedAfterAChangeThatFailed) {
  ASSERT_TRUE(Push(0, 0, 2).ok());
  ASSERT_TRUE(Push(1, 0, 2).ok());
  DetachAll();
  {
    const ScopedFileLimit limit(0);
    ASSERT_FALSE(Register(ExtendedSpec(spec_, 1 << 16)).ok());
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const bool is_marked = job_.rank_mark(rank).step == 1;
    EXPECT_EQ(step_.open_step.opened_by(rank), is_marked);
    EXPECT_EQ(stager_.StagedRanges(rank).empty(), !is_marked);
  }
}

}  // namespace
}  // namespace optstate::session
