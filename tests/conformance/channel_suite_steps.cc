// Tests of what a step does: arithmetic, skipping, accumulation, state.

#include <cmath>
#include <cstring>
#include <limits>

#include "gtest/gtest.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/step_script.h"

namespace optstate {
namespace {

using client::JobPhase;
using client::StateArray;

constexpr uint64_t kSteps = 12;

float FirstElement(const client::Session& session, uint32_t parameter) {
  float value = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(&value, session.parameter(parameter).data(), sizeof(value));
  return value;
}

TEST_P(ChannelSuite, NewJobIsLoadedThenReady) {
  auto session = Open(NewJob(UniformLayout(3, 5)));
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_TRUE((*session)->info().created);
  EXPECT_EQ((*session)->info().phase, JobPhase::kLoading);
  EXPECT_EQ((*session)->committed_step(), 0);
  ASSERT_TRUE(LoadConstant(**session, 0.5).ok());
  EXPECT_EQ((*session)->info().phase, JobPhase::kReady);
  EXPECT_EQ((*session)->committed_step(), 0);
  for (uint32_t i = 0; i < 3; ++i) {
    ASSERT_EQ((*session)->parameter(i).size(), 5 * sizeof(float));
    EXPECT_EQ(FirstElement(**session, i), 0.5f);
  }
}

// The script has everything at once against the model: dtypes, groups,
// clipping, scale, parameters without gradients.
TEST_P(ChannelSuite, StepsHaveTheModelsBits) {
  const uint64_t seed = ScriptSeed();
  const auto model = MakeFakeWorld();
  auto ours = Open(NewJob(MixedLayout()));
  auto expected = model->Open(NewJob(MixedLayout()));
  ASSERT_TRUE(ours.ok()) << ours.status();
  ASSERT_TRUE(expected.ok()) << expected.status();
  const StepScript script((*ours)->layout(), seed);
  ASSERT_TRUE(script.Load(**ours).ok());
  ASSERT_TRUE(script.Load(**expected).ok());
  for (uint64_t step = 1; step <= kSteps; ++step) {
    const auto outcome = script.Run(**ours, step);
    const auto expected_outcome = script.Run(**expected, step);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_TRUE(expected_outcome.ok()) << expected_outcome.status();
    EXPECT_EQ(outcome->step, step);
    EXPECT_TRUE(outcome->applied);
    EXPECT_EQ(outcome->gradient_norm, expected_outcome->gradient_norm);
    EXPECT_EQ(outcome->clip_coefficient, expected_outcome->clip_coefficient);
    const auto snapshot = Snapshot(**ours);
    const auto expected_snapshot = Snapshot(**expected);
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    ASSERT_TRUE(expected_snapshot.ok()) << expected_snapshot.status();
    ASSERT_EQ(FirstDifference(*snapshot, *expected_snapshot), "")
        << "after step " << step;
  }
}

TEST_P(ChannelSuite, NoGradientMeansNoUpdate) {
  const auto session = OpenLoaded(NewJob(UniformLayout(3, 100)));
  ASSERT_NE(session, nullptr);
  const auto gradient = ConstantGradient(session->layout(), 1, 2);
  const uint32_t parameter = 1;
  const void* const data = gradient.data();
  ASSERT_TRUE(session->PushGradients(1, 0, {&parameter, 1}, {&data, 1}).ok());
  const auto outcome = session->Commit(CommitOf(*session, 1));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->gradient_norm, 20);
  EXPECT_EQ(FirstElement(*session, 0), 1);
  EXPECT_NE(FirstElement(*session, 1), 1);
  EXPECT_EQ(FirstElement(*session, 2), 1);
  for (uint32_t i = 0; i < 3; ++i) {
    int64_t count = -1;
    ASSERT_TRUE(session
                    ->Fetch(StateArray::kStepCount, i,
                            {reinterpret_cast<std::byte*>(&count), 8})
                    .ok());
    EXPECT_EQ(count, i == 1 ? 1 : 0);
  }
}

TEST_P(ChannelSuite, StepWithoutAnyGradientIsTaken) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 10)));
  ASSERT_NE(session, nullptr);
  const auto outcome = session->Commit(CommitOf(*session, 1));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->applied);
  EXPECT_EQ(outcome->gradient_norm, 0);
  EXPECT_EQ(session->committed_step(), 1);
  EXPECT_EQ(FirstElement(*session, 0), 1);
}

TEST_P(ChannelSuite, OverflowSkipsTheStep) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 4100)));
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(
      PushConstant(*session, 1, 0, std::numeric_limits<float>::infinity())
          .ok());
  auto outcome = session->Commit(CommitOf(*session, 1));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->found_inf);
  EXPECT_FALSE(outcome->applied);
  EXPECT_EQ(session->committed_step(), 1);
  EXPECT_EQ(FirstElement(*session, 0), 1);

  client::CommitOptions commit = CommitOf(*session, 2);
  commit.found_inf = true;
  ASSERT_TRUE(PushConstant(*session, 2, 0, 1).ok());
  outcome = session->Commit(commit);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->found_inf);
  EXPECT_FALSE(outcome->applied);
  EXPECT_EQ(FirstElement(*session, 0), 1);

  ASSERT_TRUE(PushConstant(*session, 3, 0, 1).ok());
  outcome = session->Commit(CommitOf(*session, 3));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->applied);
  EXPECT_NE(FirstElement(*session, 0), 1);
}

TEST_P(ChannelSuite, MicroStepsAccumulate) {
  client::SessionOptions options = NewJob(UniformLayout(2, 5000));
  const auto whole = OpenLoaded(options);
  options = NewJob(UniformLayout(2, 5000));
  options.accumulate = true;
  const auto parts = OpenLoaded(options);
  ASSERT_NE(whole, nullptr);
  ASSERT_NE(parts, nullptr);
  for (uint64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(PushConstant(*whole, step, 0, 1.75).ok());
    ASSERT_TRUE(PushConstant(*parts, step, 0, 0.5).ok());
    ASSERT_TRUE(PushConstant(*parts, step, 1, 1).ok());
    ASSERT_TRUE(PushConstant(*parts, step, 4, 0.25).ok());
    // A repeat changes nothing.
    ASSERT_TRUE(PushConstant(*parts, step, 4, 100).ok());
    const auto a = whole->Commit(CommitOf(*whole, step));
    const auto b = parts->Commit(CommitOf(*parts, step));
    ASSERT_TRUE(a.ok()) << a.status();
    ASSERT_TRUE(b.ok()) << b.status();
    EXPECT_EQ(a->gradient_norm, b->gradient_norm);
  }
  const auto a = Snapshot(*whole);
  const auto b = Snapshot(*parts);
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ(FirstDifference(*a, *b), "");
}

TEST_P(ChannelSuite, ClipsToTheNorm) {
  const auto session = OpenLoaded(NewJob(UniformLayout(1, 10000)));
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(PushConstant(*session, 1, 0, 2).ok());
  client::CommitOptions commit = CommitOf(*session, 1);
  commit.grad_scale = 4;
  commit.max_norm = 5;
  const auto outcome = session->Commit(commit);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->gradient_norm, 50);
  EXPECT_NEAR(outcome->clip_coefficient, 0.1, 1e-6);
}

TEST_P(ChannelSuite, LoadsEveryArray) {
  auto opened = Open(NewJob(MixedLayout()));
  ASSERT_TRUE(opened.ok()) << opened.status();
  client::Session& session = **opened;
  ASSERT_TRUE(LoadConstant(session, 1).ok());
  ASSERT_TRUE(session.BeginLoad().ok());
  const uint32_t parameter = 6;  // float32, in the group with amsgrad
  const size_t numel = 4097;
  for (const auto array : {StateArray::kMaster, StateArray::kState0,
                           StateArray::kState1, StateArray::kState2}) {
    const std::vector<float> values(numel, static_cast<float>(array) / 2);
    const absl::Status status =
        session.Load(array, parameter, DType::kFloat32,
                     {reinterpret_cast<const std::byte*>(values.data()),
                      numel * sizeof(float)});
    ASSERT_TRUE(status.ok()) << status;
  }
  const int64_t steps = 41;
  ASSERT_TRUE(session
                  .Load(StateArray::kStepCount, parameter, DType::kFloat32,
                        {reinterpret_cast<const std::byte*>(&steps), 8})
                  .ok());
  ASSERT_TRUE(session.FinishLoad().ok());
  EXPECT_EQ(FirstElement(session, parameter), 0.5f);
  for (const auto array : {StateArray::kMaster, StateArray::kState0,
                           StateArray::kState1, StateArray::kState2}) {
    std::vector<float> values(numel);
    ASSERT_TRUE(session
                    .Fetch(array, parameter,
                           {reinterpret_cast<std::byte*>(values.data()),
                            numel * sizeof(float)})
                    .ok());
    EXPECT_EQ(values.front(), static_cast<float>(array) / 2);
    EXPECT_EQ(values.back(), static_cast<float>(array) / 2);
  }
  int64_t fetched = 0;
  ASSERT_TRUE(session
                  .Fetch(StateArray::kStepCount, parameter,
                         {reinterpret_cast<std::byte*>(&fetched), 8})
                  .ok());
  EXPECT_EQ(fetched, steps);
}

// The gradients are larger than every chunk, window and flow-control window on
// the way.
TEST_P(ChannelSuite, BigGradientsAndParameters) {
  const auto session = OpenLoaded(NewJob(UniformLayout(2, 5 << 20)));
  ASSERT_NE(session, nullptr);
  for (uint64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(PushConstant(*session, step, 0, 1).ok());
    const auto outcome = session->Commit(CommitOf(*session, step));
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_DOUBLE_EQ(outcome->gradient_norm, std::sqrt(double{10 << 20}));
  }
  const auto parameter = session->parameter(1);
  float last;
  std::memcpy(&last, parameter.data() + parameter.size() - sizeof(last),
              sizeof(last));
  EXPECT_EQ(last, FirstElement(*session, 0));
  EXPECT_LT(last, 1);
}

// More pushes than any ring or queue has room for.
TEST_P(ChannelSuite, ManySmallPushes) {
  constexpr uint32_t kParameters = 5000;
  const auto session = OpenLoaded(NewJob(UniformLayout(kParameters, 3)));
  ASSERT_NE(session, nullptr);
  for (uint64_t step = 1; step <= 2; ++step) {
    for (uint32_t i = 0; i < kParameters; ++i) {
      const float gradient[] = {1, 1, 1};
      std::memcpy(session->gradient(i)->data(), gradient, sizeof(gradient));
      const absl::Status status = session->Push(step, 0, i, 1);
      ASSERT_TRUE(status.ok()) << status;
    }
    const auto outcome = session->Commit(CommitOf(*session, step));
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_DOUBLE_EQ(outcome->gradient_norm, std::sqrt(3.0 * kParameters));
  }
  EXPECT_LT(FirstElement(*session, kParameters - 1), 1);
}

}  // namespace
}  // namespace optstate
