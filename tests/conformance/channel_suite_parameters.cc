// Tests of sessions that fetch parameters one by one.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/parameter_store/parameter_store.h"
#include "gtest/gtest.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/step_script.h"

namespace optstate {
namespace {

using client::ParameterHint;
using client::StateArray;

client::SessionOptions Fetching(LayoutSpec layout) {
  client::SessionOptions options = NewJob(std::move(layout));
  options.fetches_parameters = true;
  return options;
}

std::vector<std::byte> FetchParameter(client::Session& session,
                                      uint32_t parameter) {
  const ParameterSpec& spec = session.layout().parameters()[parameter];
  std::vector<std::byte> out(static_cast<size_t>(spec.numel) *
                             SizeInBytes(spec.dtype));
  const auto step =
      session.Fetch(StateArray::kParameter, parameter, absl::MakeSpan(out));
  EXPECT_TRUE(step.ok()) << step.status();
  if (step.ok()) {
    EXPECT_EQ(*step, session.committed_step());
  }
  return out;
}

// Over gRPC gradients are given back as they are pushed.
TEST_P(ChannelSuite, FetchedParametersHaveTheModelsBits) {
  const uint64_t seed = ScriptSeed();
  const auto model = MakeFakeWorld();
  auto ours = Open(Fetching(MixedLayout()));
  auto expected = model->Open(NewJob(MixedLayout()));
  ASSERT_TRUE(ours.ok()) << ours.status();
  ASSERT_TRUE(expected.ok()) << expected.status();
  const StepScript script((*ours)->layout(), seed);
  ASSERT_TRUE(script.Load(**ours).ok());
  ASSERT_TRUE(script.Load(**expected).ok());
  for (uint64_t step = 1; step <= 6; ++step) {
    ASSERT_TRUE(script.Run(**ours, step).ok());
    ASSERT_TRUE(script.Run(**expected, step).ok());
    for (uint32_t p = 0; p < (*ours)->layout().parameters().size(); ++p) {
      const absl::Span<const std::byte> values = (*expected)->parameter(p);
      EXPECT_TRUE(absl::MakeConstSpan(FetchParameter(**ours, p)) == values)
          << "parameter " << p << " after step " << step;
    }
  }
}

TEST_P(ChannelSuite, AnySessionFetchesParameters) {
  const auto session = OpenLoaded(NewJob(MixedLayout()), 0.5);
  ASSERT_NE(session, nullptr);
  for (uint32_t p = 0; p < session->layout().parameters().size(); ++p) {
    EXPECT_TRUE(absl::MakeConstSpan(FetchParameter(*session, p)) ==
                session->parameter(p));
  }
}

TEST_P(ChannelSuite, WhatNeedsAllParametersIsRefusedWhereTheyAreFetched) {
  const auto session = OpenLoaded(Fetching(UniformLayout(2, 10)));
  ASSERT_NE(session, nullptr);
  EXPECT_TRUE(session->parameter(0).empty());
  const uint32_t parameter = 0;
  float values[10];
  void* const destination = values;
  const client::ParameterTargets read = {{&parameter, 1}, {&destination, 1}};
  EXPECT_TRUE(absl::IsFailedPrecondition(session->ReadParameters(read)));
  EXPECT_TRUE(absl::IsFailedPrecondition(session->MapViews().status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      session->Commit(CommitOf(*session, 1), read).status()));
  EXPECT_TRUE(session->Commit(CommitOf(*session, 1)).ok());
}

TEST_P(ChannelSuite, HintsChangeNothing) {
  const auto session = OpenLoaded(Fetching(UniformLayout(3, 5000)), 0.25);
  ASSERT_NE(session, nullptr);
  const std::vector<uint32_t> some = {0, 1, 2, 0};
  for (const ParameterHint hint :
       {ParameterHint::kPrefetch, ParameterHint::kRelease}) {
    EXPECT_TRUE(session->HintParameters(hint, some).ok());
    EXPECT_TRUE(session->HintParameters(hint, {}).ok());
  }
  const uint32_t none = 3;
  EXPECT_TRUE(absl::IsInvalidArgument(
      session->HintParameters(ParameterHint::kPrefetch, {&none, 1})));
  float value = 0;
  std::memcpy(&value, FetchParameter(*session, 2).data(), sizeof(value));
  EXPECT_EQ(value, 0.25f);
}

TEST_P(ChannelSuite, AStoreTrainsByName) {
  auto session = Open(Fetching(UniformLayout(3, 5000)));
  ASSERT_TRUE(session.ok()) << session.status();
  client::ParameterStore store(*std::move(session));
  const Layout& layout = store.session().layout();
  EXPECT_TRUE(store.needs_values());
  ASSERT_TRUE(store.BeginLoad().ok());
  for (uint32_t p = 0; p < 3; ++p) {
    ASSERT_TRUE(store
                    .Load(layout.parameters()[p].name, DType::kFloat32,
                          ConstantGradient(layout, p, 1))
                    .ok());
  }
  ASSERT_TRUE(store.FinishLoad().ok());
  EXPECT_FALSE(store.needs_values());
  std::vector<float> values(5000);
  const absl::Span<std::byte> out = {
      reinterpret_cast<std::byte*>(values.data()), 5000 * sizeof(float)};
  for (uint64_t step = 1; step <= 3; ++step) {
    for (uint32_t p = 3; p > 0; --p) {  // backwards
      const std::string& name = layout.parameters()[p - 1].name;
      ASSERT_TRUE(store.Prefetch({&name, 1}).ok());
      ASSERT_TRUE(store.Fetch(name, out).ok());
      ASSERT_TRUE(store.Release({&name, 1}).ok());
      if (p == 2) continue;
      ASSERT_TRUE(store.Push(name, ConstantGradient(layout, p - 1, 0.5)).ok());
    }
    const auto outcome = store.Step(CommitOf(store.session(), step));
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->applied);
    EXPECT_EQ(store.committed_step(), step);
  }
  ASSERT_TRUE(store.Fetch(layout.parameters()[0].name, out).ok());
  EXPECT_NE(values[0], 1);
  ASSERT_TRUE(store.Fetch(layout.parameters()[1].name, out).ok());
  EXPECT_EQ(values[0], 1);  // had no gradient
  EXPECT_TRUE(absl::IsNotFound(store.Fetch("nothing", out)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      store.Push(layout.parameters()[0].name, out.first(8))));
}

}  // namespace
}  // namespace optstate
