// A step is interrupted after each store to the job's files, in turn, and must
// be finished from there to the same bits.

#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/session/testing/job_order_fixture.h"

namespace optstate::session {
namespace {

TEST_P(JobOrderTest, AStepIsFinishedFromEveryStore) {
  int finished = 0;
  const int states = StepThrough(
      [&] { Push(&harness_); }, [&] { harness_.CommitAll(CommitOf(3)); },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        copy_.SetGradients(copy_.RandomTensors(3));
        copy_.AttachAll();
        if (copy_.job().Describe().committed_step() == 2) {
          // Sums exist, except for parameters without elements.
          if (GetParam().accumulate) {
            PushMicroStep(&copy_, 1);
          } else {
            Push(&copy_);
          }
          copy_.CommitAll(CommitOf(3));
        } else {
          ++finished;
        }
        EXPECT_TRUE(copy_.StateBytes() == expected_);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  RecordProperty("states", states);
  // The stores are vectors of three parameters, their counts, and the progress.
  EXPECT_GT(states, 50);
  EXPECT_GT(finished, 40);
}

// Loads all state and is interrupted from the last rank's finish on.
TEST_P(JobOrderTest, ALoadIsWholeOrNotAtAllFromEveryStore) {
  if (GetParam().accumulate || GetParam().reduced || GetParam().speculative) {
    GTEST_SKIP() << "the same";
  }
  const auto load = [](JobHarness* harness) {
    const Tensors values = harness->RandomTensors(77);
    ASSERT_TRUE(harness->job().BeginLoad(0).ok());
    for (uint32_t p = 0; p < values.size(); ++p) {
      ASSERT_TRUE(harness->LoadMaster(0, p, values[p]).ok());
      if (!harness->layout().has_state_array(
              0, harness->layout().parameters()[p].group)) {
        continue;
      }
      ASSERT_TRUE(
          harness->LoadArray(0, v1::STATE_ARRAY_STATE_0, p, values[p]).ok());
    }
    const int64_t count = 9;
    ASSERT_TRUE(harness->job()
                    .Load(0, v1::STATE_ARRAY_STEP_COUNT, 3, 0, 1,
                          DType::kFloat32,
                          absl::MakeConstSpan(
                              reinterpret_cast<const std::byte*>(&count), 8))
                    .ok());
  };
  JobHarness before(SmallSetup(GetParam()));
  TakeTwoSteps(&before);
  const std::string old_state = before.StateBytes();
  JobHarness after(SmallSetup(GetParam()));
  TakeTwoSteps(&after);
  load(&after);
  ASSERT_TRUE(after.FinishAll().status.ok());
  const std::string new_state = after.StateBytes();
  size_t old_seen = 0, new_seen = 0;
  const int states = StepThrough(
      [&] { load(&harness_); }, [&] { harness_.FinishAll(); },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        ASSERT_EQ(copy_.job().Describe().phase(), v1::JOB_PHASE_READY);
        const std::string state = copy_.StateBytes();
        (state == new_state ? new_seen : old_seen) += 1;
        EXPECT_TRUE(state == new_state || state == old_state);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GT(old_seen, 0u);
  EXPECT_GT(new_seen, 10u);
}

TEST_P(JobOrderTest, AMicroStepIsFinishedFromEveryStore) {
  if (!GetParam().accumulate) GTEST_SKIP() << "only with accumulation";
  const int states = StepThrough([&] { PushMicroStep(&harness_, 0); },
                                 [&] { PushMicroStep(&harness_, 1); },
                                 [&] {
                                   ASSERT_TRUE(copy_.Open().ok());
                                   copy_.AttachAll();
                                   PushMicroStep(&copy_, 1);
                                   copy_.CommitAll(CommitOf(3));
                                   EXPECT_TRUE(copy_.StateBytes() == expected_);
                                 });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  RecordProperty("states", states);
  EXPECT_GT(states, 20);
}

// The update has begun with the sums of a rank that has committed when the
// other one is killed in the middle of its own.
TEST_P(JobOrderTest, AMicroStepBehindSpeculationIsAddedOnce) {
  if (!GetParam().speculative || !GetParam().accumulate) GTEST_SKIP();
  const auto push_last = [](JobHarness* harness, uint32_t rank) {
    ASSERT_TRUE(harness->Push(rank, 3, 0, 1, 1).ok());
    ASSERT_TRUE(harness->Push(rank, 3, 2, 3, 1).ok());
  };
  const int states = StepThrough(
      [&] {
        PushMicroStep(&harness_, 0);
        harness_.SetGradients(harness_.RandomTensors(4));
        push_last(&harness_, 0);
        harness_.Commit(0, CommitOf(3));
      },
      [&] { push_last(&harness_, 1); },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        copy_.AttachAll();
        PushMicroStep(&copy_, 1);
        copy_.CommitAll(CommitOf(3));
        EXPECT_TRUE(copy_.StateBytes() == expected_);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GT(states, 10);
}

constexpr OrderCase kCases[] = {
    {"Plain", false, OptimizerKind::kAdamW, StateFormat::kFloat32},
    {"Accumulating", true, OptimizerKind::kAdamW, StateFormat::kFloat32},
    {"BFloat16State", false, OptimizerKind::kAdamW, StateFormat::kBFloat16},
    {"Dynamic8State", false, OptimizerKind::kRmsprop, StateFormat::kDynamic8},
    {"Scalars", false, OptimizerKind::kNadam, StateFormat::kFloat32},
    {"Whole", false, OptimizerKind::kLamb, StateFormat::kFloat32},
    kReduced,
    {"WholeReduced", false, OptimizerKind::kLamb, StateFormat::kFloat32, true},
    {"ReducedAccumulating", true, OptimizerKind::kAdamW, StateFormat::kFloat32,
     true},
    {"AccumulatingInGradientDType", true, OptimizerKind::kAdamW,
     StateFormat::kFloat32, true, AccumulateDType::kGradient},
    {"WholeAccumulating", true, OptimizerKind::kAdafactor,
     StateFormat::kFloat32},
    {"WholeBFloat16State", false, OptimizerKind::kLamb, StateFormat::kBFloat16},
    {"WholeDynamic8State", true, OptimizerKind::kAdafactor,
     StateFormat::kDynamic8},
    {"WholeSplitMasterBFloat16State", false, OptimizerKind::kMuon,
     StateFormat::kBFloat16, false, AccumulateDType::kFloat32,
     MasterFormat::kSplit},
    {"WholeSplitMasterDynamic8State", false, OptimizerKind::kLamb,
     StateFormat::kDynamic8, true, AccumulateDType::kFloat32,
     MasterFormat::kSplit},
    {"SplitMaster", false, OptimizerKind::kAdamW, StateFormat::kFloat32, false,
     AccumulateDType::kFloat32, MasterFormat::kSplit},
    {"Speculating", false, OptimizerKind::kAdamW, StateFormat::kFloat32, false,
     AccumulateDType::kFloat32, MasterFormat::kSplit, true},
    {"SpeculatingAccumulating", true, OptimizerKind::kAdamW,
     StateFormat::kFloat32, false, AccumulateDType::kFloat32,
     MasterFormat::kFloat32, true},
    {"SplitMasterDynamic8State", false, OptimizerKind::kLion,
     StateFormat::kDynamic8, false, AccumulateDType::kFloat32,
     MasterFormat::kSplit},
};

INSTANTIATE_TEST_SUITE_P(All, JobOrderTest, ::testing::ValuesIn(kCases),
                         [](const auto& param_info) {
                           return param_info.param.name;
                         });

}  // namespace
}  // namespace optstate::session
