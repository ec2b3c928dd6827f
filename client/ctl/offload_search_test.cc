// Tests the search for an offload_fraction on a job that the test makes up: it
// takes a step at each look, whose time follows from the fraction in force.

#include "client/ctl/offload_search.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr uint64_t kSteps =
    FractionSearch::kSettlingSteps + FractionSearch::kMeasuredSteps;

class OffloadSearchTest : public testing::Test {
 protected:
  OffloadSearchTest() {
    job_.set_committed_step(7);
    controls_.look = [this]() -> absl::StatusOr<v1::Job> { return job_; };
    controls_.set = [this](double fraction) {
      if (!refusal_.ok()) return refusal_;
      set_.push_back(fraction);
      job_.mutable_storage()->set_offload_fraction(fraction);
      return absl::OkStatus();
    };
    controls_.await = [this] {
      const bool gives_up = job_.committed_step() >= interrupted_at_;
      if (!gives_up) TakeStep();
      return gives_up;
    };
    controls_.show = [this](const std::string& text) {
      shown_.push_back(text);
    };
  }

  // The CPU alone takes 100 ms and the devices 300.
  void TakeStep() {
    job_.set_committed_step(job_.committed_step() + 1);
    job_.mutable_last_outcome()->set_applied(true);
    const double fraction = job_.storage().offload_fraction();
    job_.mutable_last_step_times()->set_update_ns(
        static_cast<uint64_t>(1e8 * std::max(fraction, 3 * (1 - fraction))));
  }

  v1::Job job_;
  OffloadControls controls_;
  std::vector<double> set_;
  std::vector<std::string> shown_;
  absl::Status refusal_;
  uint64_t interrupted_at_ = UINT64_MAX;
};

TEST_F(OffloadSearchTest, LeavesTheFastestSetAndSaysSo) {
  const auto found = SearchOffload("gpt", controls_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->fraction(), 0.75);
  EXPECT_EQ(set_.back(), 0.75);
  EXPECT_EQ(set_.front(), 1);
  EXPECT_THAT(OffloadSearchText(*found),
              HasSubstr("0.75 is the fastest of 9 that were tried, with 75 ms "
                        "an update; the CPU alone takes 100 ms, devices alone "
                        "300 ms"));
  EXPECT_THAT(shown_, Each(HasSubstr("job gpt: step ")));
  EXPECT_THAT(shown_.back(), HasSubstr("9 tried"));
}

TEST_F(OffloadSearchTest, StepsThatSayNothingDoNotCount) {
  size_t looks = 0;
  controls_.await = [&] {
    switch (++looks % 4) {
      case 0:
        TakeStep();
        break;
      case 1:  // a step that was skipped
        TakeStep();
        job_.mutable_last_outcome()->set_applied(false);
        job_.mutable_last_step_times()->set_update_ns(1);
        break;
      case 2:  // an engine that is being started
        job_.set_ranks_unknown(true);
        break;
      default:  // no step
        job_.set_ranks_unknown(false);
    }
    return false;
  };
  const auto found = SearchOffload("gpt", controls_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->fraction(), 0.75);
  EXPECT_EQ(looks, 4 * kSteps * found->tried());
}

TEST_F(OffloadSearchTest, AnInterruptLeavesTheFastestSoFar) {
  // Two fractions are known, and the third is in force.
  interrupted_at_ = 7 + 2 * kSteps + 1;
  const absl::Status cut = SearchOffload("gpt", controls_).status();
  EXPECT_TRUE(absl::IsCancelled(cut)) << cut;
  EXPECT_THAT(cut.ToString(), HasSubstr("offload_fraction is 1)"));
  EXPECT_EQ(set_.back(), 1);
  EXPECT_THAT(set_, SizeIs(4));
}

TEST_F(OffloadSearchTest, ARefusalIsPassedOnWithWhatIsInForce) {
  job_.mutable_storage()->set_offload_fraction(0.25);
  refusal_ = absl::FailedPreconditionError("no device: see --devices");
  const absl::Status refused = SearchOffload("gpt", controls_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.ToString(),
              HasSubstr("see --devices (offload_fraction is 0.25)"));
}

TEST_F(OffloadSearchTest, AJobThatSpeculatesIsRefused) {
  job_.mutable_speculation();
  const absl::Status refused = SearchOffload("gpt", controls_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.ToString(), HasSubstr("speculates"));
  EXPECT_THAT(set_, SizeIs(0));
}

TEST_F(OffloadSearchTest, AnotherJobOfTheNameEndsIt) {
  controls_.await = [this] {
    job_.set_committed_step(0);
    return false;
  };
  const absl::Status ended = SearchOffload("gpt", controls_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
  EXPECT_THAT(ended.ToString(), HasSubstr("from step 7 to 0"));
}

TEST_F(OffloadSearchTest, WhatTheDaemonAnswersIsPassedOn) {
  controls_.look = []() -> absl::StatusOr<v1::Job> {
    return absl::NotFoundError("there is no job gpt");
  };
  EXPECT_EQ(SearchOffload("gpt", controls_).status(),
            absl::NotFoundError("there is no job gpt"));
}

}  // namespace
}  // namespace optstate::ctl
