#include "server/session/ranks/attach_rules.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

class Listener final : public SessionListener {
 public:
  void OnStepDone(uint64_t, const absl::Status&, const StepOutcome&) override {}
};

// A rank that may attach; each test spoils one thing.
class AttachRulesTest : public ::testing::Test {
 protected:
  AttachRulesTest() {
    spec_.rank = 1;
    spec_.layout_hash = "hash";
    spec_.gradient_area = &area_;
    spec_.gradient_area_bytes = 100;
    spec_.listener = &listener_;
    facts_.job = "job";
    facts_.world_size = 2;
    facts_.layout_hash = "hash";
    facts_.shape = 3;
    facts_.gradient_bytes = 100;
  }

  absl::Status Check() {
    return CheckAttach(spec_, facts_, [&] {
      asked_ = true;
      return held_;
    });
  }
  void ExpectRefused(absl::StatusCode code, const std::string& text) {
    const absl::Status status = Check();
    EXPECT_EQ(status.code(), code);
    EXPECT_THAT(status.message(), HasSubstr(text));
  }

  Listener listener_;
  std::byte area_{};
  AttachSpec spec_;
  AttachFacts facts_;
  absl::Status held_;
  bool asked_ = false;
};

TEST_F(AttachRulesTest, ANewSessionAttaches) {
  EXPECT_TRUE(Check().ok());
  EXPECT_TRUE(asked_);
}

TEST_F(AttachRulesTest, TheWorldHasTheRank) {
  spec_.rank = 2;
  ExpectRefused(absl::StatusCode::kInvalidArgument, "rank 2 of a world of 2");
}

TEST_F(AttachRulesTest, OnlyTheLastInstanceComesBack) {
  spec_.comes_back = true;
  ExpectRefused(absl::StatusCode::kFailedPrecondition, "another session's");
  facts_.was_attached_last = true;
  EXPECT_TRUE(Check().ok());
}

TEST_F(AttachRulesTest, ADrainingJobTakesOnlyWhoWasThere) {
  facts_.draining = true;
  ExpectRefused(absl::StatusCode::kUnavailable, "draining");
  facts_.was_attached_last = true;
  EXPECT_TRUE(Check().ok());
}

TEST_F(AttachRulesTest, LayoutAndShapeAreThoseOfTheJob) {
  spec_.shape = 3;
  EXPECT_TRUE(Check().ok());
  spec_.shape = 4;
  ExpectRefused(absl::StatusCode::kFailedPrecondition, "other settings");
  spec_.shape = 0;
  spec_.layout_hash = "other";
  ExpectRefused(absl::StatusCode::kFailedPrecondition, "another layout");
}

TEST_F(AttachRulesTest, ARankIsAttachedOnce) {
  facts_.attached_pid = 77;
  ExpectRefused(absl::StatusCode::kAlreadyExists, "by process 77");
}

// The check whether the former process runs is for other sessions only.
TEST_F(AttachRulesTest, AHeldPlaceIsOnlyTheLastInstances) {
  held_ = absl::AlreadyExistsError("is process 5");
  ExpectRefused(absl::StatusCode::kAlreadyExists, "is process 5");
  asked_ = false;
  facts_.was_attached_last = true;
  EXPECT_TRUE(Check().ok());
  EXPECT_FALSE(asked_);
}

TEST_F(AttachRulesTest, ItBringsAListenerAndEnoughMemory) {
  spec_.gradient_area_bytes = 99;
  ExpectRefused(absl::StatusCode::kFailedPrecondition, "room for 99");
  spec_.gradient_area = nullptr;
  ExpectRefused(absl::StatusCode::kInvalidArgument, "no gradient area");
  facts_.gradient_bytes = 0;
  EXPECT_TRUE(Check().ok());
  spec_.listener = nullptr;
  ExpectRefused(absl::StatusCode::kInvalidArgument, "no listener");
}

}  // namespace
}  // namespace optstate::session
