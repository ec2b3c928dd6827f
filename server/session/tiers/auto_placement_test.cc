#include "server/session/tiers/auto_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kFrame = 4096;
constexpr uint64_t kRecords = 100;

class AutoPlacementTest : public testing::Test {
 protected:
  AutoPlacementTest() {
    question_.asked.set_placement(v1::PLACEMENT_AUTO);
    question_.sizes.frame = kFrame;
    question_.sizes.records = kRecords;
    question_.sizes.directories = {30, 10};
    question_.has_disk = true;
    question_.default_budget_bytes = 10 * kFrame + 1;
  }

  absl::StatusOr<v1::StorageSettings> Choose() {
    return ChoosePlacement(question_, [this](const v1::StorageSettings& s) {
      const bool fits =
          s.placement() == v1::PLACEMENT_HOST
              ? host_fits_
              : s.host_budget_bytes() <= frames_that_fit_ * kFrame;
      return fits ? absl::OkStatus()
                  : absl::ResourceExhaustedError(
                        s.placement() == v1::PLACEMENT_HOST ? "host" : "nvme");
    });
  }
  void ExpectBudget(uint64_t bytes) {
    const auto chosen = Choose();
    ASSERT_TRUE(chosen.ok()) << chosen.status();
    EXPECT_EQ(chosen->placement(), v1::PLACEMENT_NVME);
    EXPECT_EQ(chosen->host_budget_bytes(), bytes);
  }

  PlacementQuestion question_;
  bool host_fits_ = false;
  uint64_t frames_that_fit_ = 1000;
};

TEST_F(AutoPlacementTest, MemoryIsTakenWhereItFits) {
  host_fits_ = true;
  question_.asked.set_host_budget_bytes(5 * kFrame);
  const auto chosen = Choose();
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->placement(), v1::PLACEMENT_HOST);
  EXPECT_EQ(chosen->host_budget_bytes(), 0u);
}

TEST_F(AutoPlacementTest, TheBudgetIsWhatTheNodeHasLeft) {
  ExpectBudget(10 * kFrame);
  question_.node_budget_left = 40 * kFrame + 7;
  ExpectBudget(40 * kFrame);
  question_.node_budget_left = 400 * kFrame;
  ExpectBudget(kRecords * kFrame);
  // Three records are asked for, and refused where they are needed.
  question_.node_budget_left = 0;
  ExpectBudget(3 * kFrame);
}

TEST_F(AutoPlacementTest, LessIsTakenWhereThatAloneIsAdmitted) {
  question_.node_budget_left = 64 * kFrame;
  for (uint64_t frames = 3; frames < 64; ++frames) {
    frames_that_fit_ = frames;
    ExpectBudget(frames * kFrame);
  }
  frames_that_fit_ = 2;
  const auto refused = Choose();
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_EQ(refused.status().message(), "nvme");
}

TEST_F(AutoPlacementTest, ABudgetThatIsAskedForIsTheBudget) {
  question_.asked.set_host_budget_bytes(20 * kFrame + 5);
  ExpectBudget(20 * kFrame + 5);
  frames_that_fit_ = 10;
  EXPECT_TRUE(absl::IsResourceExhausted(Choose().status()));
}

TEST_F(AutoPlacementTest, WithoutADiskMemoryIsAll) {
  question_.has_disk = false;
  const auto refused = Choose();
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_THAT(refused.status().message(), HasSubstr("host; and this daemon"));
}

TEST_F(AutoPlacementTest, OtherErrorsEndTheSearch) {
  const auto refused =
      ChoosePlacement(question_, [](const v1::StorageSettings&) {
        return absl::UnimplementedError("no");
      });
  EXPECT_TRUE(absl::IsUnimplemented(refused.status()));
}

TEST_F(AutoPlacementTest, AStepTakesWhatTheSlowestPartTakes) {
  v1::StorageSettings storage;
  storage.set_placement(v1::PLACEMENT_NVME);
  storage.set_host_budget_bytes(20 * kFrame);
  DiskRates rates;
  rates.directories.resize(2);
  const storage::SwapSizes& sizes = question_.sizes;
  StepEstimate step = EstimateStep(storage, sizes, rates, 0);
  EXPECT_EQ(step.disk_bytes, 2 * 80 * kFrame);
  EXPECT_EQ(step.disk_s, 0);
  EXPECT_EQ(step.memory_s, 0);
  EXPECT_THAT(TextOf(step), HasSubstr("in a time that is not known"));
  for (v1::DirectoryRates& one : rates.directories) {
    one.set_measured_at_ns(1);
    one.set_write_bytes_per_s(40 * kFrame);
    one.set_mixed_bytes_per_s(20 * kFrame);
  }
  step = EstimateStep(storage, sizes, rates, 100 * kFrame);
  // Three quarters of 80 records, read and written, by the first directory.
  EXPECT_DOUBLE_EQ(step.disk_s, 6);
  EXPECT_DOUBLE_EQ(step.memory_s, 2);
  EXPECT_THAT(TextOf(step), HasSubstr("in 6.000 s and the state in memory in "
                                      "2.000 s: the disk is the limit"));
  // Every step is durable: the 20 records in frames are written too.
  storage.set_durability(v1::DURABILITY_KIND_STEP);
  step = EstimateStep(storage, sizes, rates, 100 * kFrame);
  EXPECT_EQ(step.disk_bytes, (80 + 100) * kFrame);
  EXPECT_DOUBLE_EQ(step.disk_s, 6 + 0.75 * 20 / 40);
  storage.set_durability(v1::DURABILITY_KIND_EVERY);
  storage.set_every_steps(50);
  storage.set_placement(v1::PLACEMENT_HOST);
  step = EstimateStep(storage, sizes, rates, 100 * kFrame);
  EXPECT_EQ(step.disk_bytes, 4 * kFrame) << "all in 25 steps";
}

}  // namespace
}  // namespace optstate::session
