// Tests of loads, fetches and their interruption.

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kMaster = v1::STATE_ARRAY_MASTER;
constexpr auto kExpAvg = v1::STATE_ARRAY_STATE_0;
constexpr auto kMaxExpAvgSq = v1::STATE_ARRAY_STATE_2;
constexpr auto kStepCount = v1::STATE_ARRAY_STEP_COUNT;

LayoutSpec SmallLayout() {
  LayoutSpec spec;
  spec.groups = {{}, {.options = adam::kAmsgrad}};
  spec.parameters = {
      MakeParameter("a", 6000), MakeParameter("none", 0),
      MakeParameter("b", 9000, 0, DType::kBFloat16, DType::kBFloat16),
      MakeParameter("c", 100, 1, DType::kFloat16)};
  return spec;
}

JobHarness::Setup TwoRanks() {
  JobHarness::Setup setup;
  setup.layout = SmallLayout();
  setup.world_size = 2;
  setup.partition = PartitionMode::kContiguous;
  return setup;
}

template <typename T>
absl::Span<const std::byte> BytesOf(const std::vector<T>& values) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                             values.size() * sizeof(T));
}

class JobLoadTest : public ::testing::Test {
 protected:
  v1::JobPhase phase() { return harness_.job().Describe().phase(); }
  absl::Status StepStatus(uint64_t step) {
    CommitSpec spec;
    spec.step = step;
    const std::vector<Hyperparams> groups(harness_.layout().groups().size(),
                                          AdamHyperparams());
    spec.groups = groups;
    harness_.SetGradients(harness_.RandomTensors(5));
    for (uint32_t rank = 0; rank < 2; ++rank) {
      absl::Status pushed = harness_.Push(
          rank, step, 0,
          static_cast<uint32_t>(harness_.layout().parameters().size()));
      if (!pushed.ok()) return pushed;
    }
    return harness_.CommitAll(spec).status;
  }
  // Returns the status of a single load by rank 0.
  absl::Status LoadStatus(v1::StateArray array, uint32_t parameter,
                          uint64_t begin, uint64_t numel) {
    const std::vector<float> values(numel > 10000 ? 0 : numel, 1.0f);
    return harness_.job().Load(0, array, parameter, begin, numel,
                               DType::kFloat32, BytesOf(values));
  }

  JobHarness harness_{TwoRanks()};
  const Tensors masters_ = harness_.RandomTensors(1);
};

TEST_F(JobLoadTest, NewJobIsLoadingUntilAllRanksHaveFinished) {
  EXPECT_EQ(phase(), v1::JOB_PHASE_EMPTY);
  harness_.AttachAll();
  EXPECT_EQ(phase(), v1::JOB_PHASE_LOADING);
  EXPECT_EQ(StepStatus(1).code(), absl::StatusCode::kFailedPrecondition);
  harness_.LoadMasters(masters_);
  harness_.job().FinishLoad(0, 100, {});
  EXPECT_EQ(harness_.AnswerTo(0, 100), nullptr);
  EXPECT_EQ(phase(), v1::JOB_PHASE_LOADING);
  harness_.job().FinishLoad(1, 101, {});
  ASSERT_NE(harness_.AnswerTo(0, 100), nullptr);
  EXPECT_TRUE(harness_.AnswerTo(0, 100)->status.ok());
  ASSERT_NE(harness_.AnswerTo(1, 101), nullptr);
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  EXPECT_TRUE(StepStatus(1).ok());
}

TEST_F(JobLoadTest, MastersComeBackAndParametersAreTheirRounding) {
  harness_.Start(masters_);
  for (uint32_t p = 0; p < masters_.size(); ++p) {
    EXPECT_EQ(harness_.Fetch(kMaster, p), masters_[p]);
    const std::vector<float> parameter = harness_.Parameter(p);
    for (size_t i = 0; i < parameter.size(); ++i) {
      ASSERT_NEAR(parameter[i], masters_[p][i],
                  harness_.layout().parameters()[p].dtype == DType::kFloat32
                      ? 0
                      : 1.0 / 256);
    }
  }
  std::vector<std::byte> area(harness_.layout().parameter_area_bytes());
  ASSERT_TRUE(harness_.job().ReadParameters(0, absl::MakeSpan(area)).ok());
  EXPECT_EQ(std::memcmp(area.data(), masters_[0].data(),
                        masters_[0].size() * sizeof(float)),
            0);
  EXPECT_EQ(harness_.job().ReadParameters(1, absl::MakeSpan(area)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(JobLoadTest, AllArraysRoundTrip) {
  harness_.Start(masters_);
  const Tensors values = harness_.RandomTensors(7);
  const std::vector<int64_t> counts = {3, 0, 5, 7};
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.job().BeginLoad(rank).ok());
    for (uint32_t p = 0; p < values.size(); ++p) {
      for (const v1::StateArray array :
           {kMaster, kExpAvg, v1::STATE_ARRAY_STATE_1}) {
        ASSERT_TRUE(harness_.LoadArray(rank, array, p, values[p]).ok());
      }
    }
    ASSERT_TRUE(harness_.LoadArray(rank, kMaxExpAvgSq, 3, values[3]).ok());
    ASSERT_TRUE(
        harness_.job()
            .Load(rank, kStepCount, 0, 0, 4, DType::kFloat32, BytesOf(counts))
            .ok());
  }
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  const auto check = [&] {
    for (uint32_t p = 0; p < values.size(); ++p) {
      EXPECT_EQ(harness_.Fetch(kMaster, p), values[p]);
      EXPECT_EQ(harness_.Fetch(kExpAvg, p), values[p]);
      EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_STATE_1, p), values[p]);
    }
    EXPECT_EQ(harness_.Fetch(kMaxExpAvgSq, 3), values[3]);
    EXPECT_EQ(harness_.StepCounts(), counts);
  };
  check();
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  check();
}

TEST_F(JobLoadTest, HalfPrecisionAtAnyAddress) {
  harness_.AttachAll();
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  // 3,000 elements of 1.0 in bfloat16, at an odd address.
  std::vector<uint8_t> bytes(6001);
  for (size_t i = 0; i < 3000; ++i) {
    bytes[1 + 2 * i] = 0x80;
    bytes[2 + 2 * i] = 0x3f;
  }
  ASSERT_TRUE(harness_.job()
                  .Load(0, kMaster, 0, 0, 3000, DType::kBFloat16,
                        BytesOf(bytes).subspan(1))
                  .ok());
  const auto parameter = harness_.Parameter(0);
  EXPECT_THAT(std::vector<float>(parameter.begin(), parameter.begin() + 3000),
              Each(1.0f));
  EXPECT_EQ(parameter[3000], 0);
}

TEST_F(JobLoadTest, BadLoadsAreRefused) {
  harness_.AttachAll();
  EXPECT_EQ(LoadStatus(kMaster, 0, 0, 1).code(),
            absl::StatusCode::kFailedPrecondition);  // not begun
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  const auto expect_invalid = [](const absl::Status& status, const char* text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(text));
  };
  expect_invalid(LoadStatus(kMaster, 4, 0, 1), "of a layout of 4");
  expect_invalid(LoadStatus(kMaster, 0, 6000, 1), "which has 6000");
  expect_invalid(LoadStatus(kMaster, 0, 1, UINT64_MAX), "which has 6000");
  expect_invalid(LoadStatus(kMaster, 2, 8000, 1000), "belong to rank 0");
  expect_invalid(LoadStatus(kMaxExpAvgSq, 0, 0, 1), "without the option");
  expect_invalid(LoadStatus(v1::STATE_ARRAY_UNSPECIFIED, 0, 0, 1), "array");
  expect_invalid(harness_.job().Load(0, kMaster, 0, 0, 2, DType::kFloat32,
                                     BytesOf(std::vector<float>{1})),
                 "8 bytes, 4 were given");
  for (const int64_t count : {int64_t{-1}, INT64_MAX}) {
    expect_invalid(harness_.job().Load(0, kStepCount, 0, 0, 1, DType::kFloat32,
                                       BytesOf(std::vector<int64_t>{count})),
                   "step count");
  }
  const std::vector<int64_t> one = {1};
  expect_invalid(harness_.job().Load(0, kStepCount, 4, 0, 1, DType::kFloat32,
                                     BytesOf(one)),
                 "of a layout of 4");
  expect_invalid(harness_.job().Load(0, kStepCount, 0, 1, 1, DType::kFloat32,
                                     BytesOf(one)),
                 "begin is 1");
}

TEST_F(JobLoadTest, BadFetchesAreRefused) {
  std::vector<std::byte> out(8);
  EXPECT_EQ(harness_.job()
                .Fetch(kMaster, 0, 0, 2, absl::MakeSpan(out))
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);  // not registered
  harness_.AttachAll();
  EXPECT_EQ(harness_.job()
                .Fetch(kMaster, 0, 0, 2, absl::MakeSpan(out))
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);  // loading
  harness_.LoadMasters(masters_);
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  const auto code = [&](v1::StateArray array, uint32_t parameter,
                        uint64_t begin, uint64_t numel) {
    return harness_.job()
        .Fetch(array, parameter, begin, numel, absl::MakeSpan(out))
        .status()
        .code();
  };
  EXPECT_EQ(code(kMaster, 0, 0, 2), absl::StatusCode::kOk);
  EXPECT_EQ(code(kStepCount, 3, 0, 1), absl::StatusCode::kOk);
  EXPECT_EQ(code(kMaster, 0, 0, 3), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kMaster, 9, 0, 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kMaster, 0, 5999, 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kMaster, 0, UINT64_MAX, 2),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kMaxExpAvgSq, 0, 0, 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kStepCount, 4, 0, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kStepCount, 0, 1, 0), absl::StatusCode::kInvalidArgument);
}

TEST_F(JobLoadTest, ANewJobMustBeLoadedWhole) {
  harness_.AttachAll();
  harness_.LoadMasters({masters_[0]});
  const auto answer = harness_.FinishAll();
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(answer.status.message(), HasSubstr("\"b\" were not loaded"));
  EXPECT_EQ(phase(), v1::JOB_PHASE_LOADING);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (uint32_t p = 1; p < masters_.size(); ++p) {
      ASSERT_TRUE(harness_.LoadMaster(rank, p, masters_[p]).ok());
    }
  }
  EXPECT_TRUE(harness_.FinishAll().status.ok());
}

TEST_F(JobLoadTest, AReadyJobMayBeLoadedInPart) {
  harness_.Start(masters_);
  ASSERT_TRUE(StepStatus(1).ok());
  const auto b = harness_.Fetch(kMaster, 2);
  const std::vector<float> zeros(6000);
  harness_.LoadMasters({zeros});
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_EQ(harness_.Fetch(kMaster, 0), zeros);
  EXPECT_EQ(harness_.Fetch(kMaster, 2), b);
  EXPECT_TRUE(StepStatus(2).ok());
}

TEST_F(JobLoadTest, ARankThatLeavesHasNotFinished) {
  harness_.AttachAll();
  harness_.LoadMasters(masters_);
  harness_.job().FinishLoad(0, 100, {});
  harness_.Detach(0);
  harness_.job().FinishLoad(1, 101, {});
  EXPECT_EQ(harness_.AnswerTo(1, 101), nullptr);
  ASSERT_TRUE(harness_.Register(0).ok());
  ASSERT_TRUE(harness_.Attach(0).ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_LOADING);
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  for (uint32_t p = 0; p < masters_.size(); ++p) {
    ASSERT_TRUE(harness_.LoadMaster(0, p, masters_[p]).ok());
  }
  harness_.job().FinishLoad(0, 102, {});
  ASSERT_NE(harness_.AnswerTo(1, 101), nullptr);
  EXPECT_TRUE(harness_.AnswerTo(1, 101)->status.ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
}

// The count tells a rank whose answer was lost whether its load is finished.
TEST_F(JobLoadTest, LoadsThatAllHaveFinishedAreCounted) {
  harness_.Start(masters_);
  const auto count = [&] {
    harness_.DetachAll();
    const auto first = harness_.Attach(0);
    EXPECT_TRUE(first.ok() && harness_.Attach(1).ok());
    return first->loads_finished;
  };
  EXPECT_EQ(count(), 1u);
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  ASSERT_TRUE(harness_.job().BeginLoad(1).ok());
  harness_.job().FinishLoad(0, 100, {});
  EXPECT_EQ(count(), 1u);
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  ASSERT_TRUE(harness_.job().BeginLoad(1).ok());
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  ASSERT_TRUE(StepStatus(1).ok());
  harness_.Close();
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(count(), 2u);
}

// The rest of a new job stays required, and arrays that a later load leaves out
// are zero, not the former load's values.
TEST_F(JobLoadTest, AFirstLoadThatWasInterruptedMustBeTakenAgain) {
  for (const bool restart : {false, true}) {
    JobHarness harness(TwoRanks());
    harness.AttachAll();
    harness.LoadMasters({masters_[0], masters_[1]});
    ASSERT_TRUE(harness.LoadArray(1, kExpAvg, 2, masters_[2]).ok());
    if (restart) {
      harness.Close();
      ASSERT_TRUE(harness.Open().ok());
    } else {
      harness.DetachAll();
    }
    EXPECT_EQ(harness.job().Describe().phase(), v1::JOB_PHASE_LOADING);
    harness.AttachAll();
    harness.LoadMasters({masters_[0], masters_[1]});
    const auto refused = harness.FinishAll();
    EXPECT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(refused.status.message(), HasSubstr("\"b\" were not loaded"));
    harness.LoadMasters(masters_);
    ASSERT_TRUE(harness.FinishAll().status.ok());
    EXPECT_THAT(harness.Fetch(kExpAvg, 2), Each(0.0f));
    EXPECT_EQ(harness.Fetch(kMaster, 0), masters_[0]);
  }
}

// Adafactor has fewer elements than its parameters, and not all of its arrays
// are in the job's format.
TEST_F(JobLoadTest, AnInterruptedLoadClearsRowsColumnsAndBlocks) {
  JobHarness::Setup setup;
  setup.layout.optimizer = OptimizerKind::kAdafactor;
  setup.layout.state_format = StateFormat::kDynamic8;
  const auto add_group = [&setup](const char* name) {
    const auto group = static_cast<uint32_t>(setup.layout.groups.size());
    setup.layout.groups.emplace_back();
    auto& parameters = setup.layout.parameters;
    parameters.push_back(
        MakeParameter(absl::StrCat(name, " matrix"), 4800, group));
    parameters.back().shape = {8, 600};
    parameters.push_back(
        MakeParameter(absl::StrCat(name, " vector"), 300, group));
  };
  add_group("kept");
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  const Hyperparams group = DefaultHyperparams(OptimizerKind::kAdafactor);
  CommitSpec spec;
  spec.step = 1;
  spec.groups = absl::MakeConstSpan(&group, 1);
  harness.Step(1, harness.RandomTensors(2), spec);
  const auto state_of = [&harness](uint32_t p) {
    Tensors state;
    for (const auto array : {v1::STATE_ARRAY_STATE_0, v1::STATE_ARRAY_STATE_1,
                             v1::STATE_ARRAY_STATE_2}) {
      state.push_back(harness.Fetch(array, p));
    }
    return state;
  };
  const Tensors kept[] = {state_of(0), state_of(1)};
  harness.DetachAll();
  add_group("cleared");
  harness.SetLayout(setup.layout);
  ASSERT_TRUE(harness.Register(0, /*extend=*/true).ok());
  ASSERT_TRUE(harness.Attach(0).ok());
  const Tensors masters = harness.RandomTensors(1);
  ASSERT_TRUE(harness.job().BeginLoad(0).ok());
  for (const uint32_t p : {1, 3}) {
    ASSERT_TRUE(
        harness.LoadArray(0, v1::STATE_ARRAY_STATE_2, p, masters[p]).ok());
  }
  ASSERT_TRUE(harness.job()
                  .Load(0, kStepCount, 0, 0, 4, DType::kFloat32,
                        BytesOf(std::vector<int64_t>{7, 7, 7, 7}))
                  .ok());
  harness.Close();
  ASSERT_TRUE(harness.Open().ok());
  harness.AttachAll();
  harness.LoadMasters(masters);
  ASSERT_TRUE(harness.FinishAll().status.ok());
  EXPECT_EQ(harness.StepCounts(), std::vector<int64_t>({1, 1, 0, 0}));
  for (const uint32_t p : {0, 1}) {
    EXPECT_EQ(state_of(p), kept[p]);
    EXPECT_THAT(kept[p], Not(Each(Each(0.0f))));
    EXPECT_THAT(state_of(p + 2), Each(Each(0.0f)));
  }
}

TEST_F(JobLoadTest, ABeginWithoutLoadsChangesNothing) {
  harness_.Start(masters_);
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  const absl::Status pushed = harness_.Push(0, 1, 0, 4);
  EXPECT_EQ(pushed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(pushed.message(), HasSubstr("rank 0 has begun a load"));
  EXPECT_TRUE(harness_.Push(1, 1, 0, 4).ok());  // perhaps in its backward()
  harness_.DetachAll();
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  harness_.AttachAll();
  EXPECT_TRUE(StepStatus(1).ok());
}

TEST_F(JobLoadTest, BeginLoadDropsWhatTheRankStaged) {
  harness_.Start(masters_);
  ASSERT_TRUE(harness_.Push(0, 1, 0, 4).ok());
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  EXPECT_EQ(harness_.job().Describe().open_step(), "");
}

}  // namespace
}  // namespace optstate::session
