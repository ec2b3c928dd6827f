// A speculative job that is extended: what was kept of former values lies where
// the entries of the new runs are looked for.

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/session/steps/foreseen_commit.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

// Steps before the extension, of which the last are begun early, and between it
// and the first step that is begun early again.
constexpr uint64_t kBefore = ForeseenCommit::kSteps + 1;
constexpr uint64_t kStep = kBefore + ForeseenCommit::kSteps + 1;
constexpr size_t kNumel = 4096;
// More runs than entries that the first parameter's run had room for.
constexpr size_t kAddedNumel = 20 * kNumel;

LayoutSpec LayoutOf(bool extended) {
  LayoutSpec spec;
  spec.groups = {{}};
  spec.parameters = {MakeParameter("a", kNumel)};
  if (!extended) return spec;
  spec.groups.push_back({});
  spec.parameters.push_back(MakeParameter("b", kAddedNumel, 1));
  return spec;
}

// Values of which two are, as the keeper sees them, the entry of a run that is
// kept in kStep.
std::vector<float> ValuesLikeEntries() {
  std::vector<float> values(kNumel, 0);
  for (size_t i = 0; i < kNumel; i += 2) {
    values[i] = std::bit_cast<float>(static_cast<uint32_t>(kStep));
  }
  return values;
}

class JobEarlyExtensionTest : public ::testing::Test {
 protected:
  static JobHarness::Setup Speculative() {
    JobHarness::Setup setup;
    setup.layout = LayoutOf(/*extended=*/false);
    setup.speculative = true;
    return setup;
  }
  CommitSpec CommitOf(uint64_t step) {
    groups_.assign(harness_.layout().groups().size(), AdamHyperparams());
    for (Hyperparams& group : groups_) group.value[0] = 1e-3;
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    return spec;
  }
  // Takes steps up to this one. Parameters without a gradient keep their
  // values.
  void TakeSteps(uint64_t first, uint64_t last, const Tensors& gradients) {
    for (uint64_t step = first; step <= last; ++step) {
      Begin(step, gradients);
      harness_.CommitAll(CommitOf(step));
    }
  }
  void Begin(uint64_t step, const Tensors& gradients) {
    harness_.SetGradients(gradients);
    harness_.PushAll(step);
    while (harness_.job().WorkAhead(0)) {
    }
  }
  uint64_t StepsBegun() {
    return harness_.job().Describe().speculation().steps_begun();
  }

  JobHarness harness_{Speculative()};
  std::vector<Hyperparams> groups_;
};

TEST_F(JobEarlyExtensionTest, WhatWasKeptBeforeIsNoEntry) {
  const std::vector<float> zeros(kNumel, 0);
  harness_.Start({ValuesLikeEntries()});
  TakeSteps(1, kBefore, {zeros});
  ASSERT_EQ(StepsBegun(), 1);
  harness_.DetachAll();
  harness_.SetLayout(LayoutOf(/*extended=*/true));
  const auto extended = harness_.Register(0, /*extend=*/true);
  ASSERT_TRUE(extended.ok()) << extended.status();
  harness_.AttachAll();
  harness_.LoadMasters(harness_.RandomTensors(1));
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  const Tensors gradients = harness_.RandomTensors(2);
  TakeSteps(kBefore + 1, kStep - 1, gradients);
  const std::string committed = harness_.StateBytes();
  Begin(kStep, gradients);
  EXPECT_EQ(StepsBegun(), 2);
  EXPECT_TRUE(harness_.StateBytes() == committed);  // by a roll back
}

}  // namespace
}  // namespace optstate::session
