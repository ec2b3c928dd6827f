#include "server/admin/kept_answers.h"

#include <gtest/gtest.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace optstate::admin {
namespace {

constexpr pid_t kEngine = 17;

class KeptAnswersTest : public testing::Test {
 protected:
  void Keep(const std::string& job, uint64_t step, pid_t engine = kEngine) {
    KeepAskedAt(now_, job, step, engine);
  }
  void KeepAskedAt(absl::Time at, const std::string& job, uint64_t step,
                   pid_t engine = kEngine) {
    v1::Job answer;
    answer.set_committed_step(step);
    kept_.Keep(job, engine, at, std::move(answer));
  }
  // Returns the step of the answer; -1: there is none.
  int64_t Find(const std::string& job, absl::Duration age_max,
               pid_t engine = kEngine) const {
    const std::shared_ptr<const v1::Job> found =
        kept_.Find(job, engine, age_max);
    return found == nullptr ? -1
                            : static_cast<int64_t>(found->committed_step());
  }

  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  KeptAnswers kept_{[this] { return now_; }};
};

TEST_F(KeptAnswersTest, AnAnswerServesUntilItIsTooOldForItsCaller) {
  EXPECT_EQ(Find("a", KeptAnswers::kAgeMax), -1);
  Keep("a", 5);
  now_ += absl::Milliseconds(100);
  EXPECT_EQ(Find("a", absl::Milliseconds(100)), 5);
  EXPECT_EQ(Find("a", absl::Milliseconds(99)), -1);
  EXPECT_EQ(Find("b", absl::Milliseconds(100)), -1);
}

TEST_F(KeptAnswersTest, NoCallerGetsAnOlderOneThanTheMost) {
  Keep("a", 5);
  now_ += KeptAnswers::kAgeMax;
  EXPECT_EQ(Find("a", absl::InfiniteDuration()), 5);
  now_ += absl::Nanoseconds(1);
  EXPECT_EQ(Find("a", absl::InfiniteDuration()), -1);
}

// The age counts from the question: the answer may have been long on its way.
TEST_F(KeptAnswersTest, TheAgeIsThatOfTheQuestion) {
  KeepAskedAt(now_ - absl::Milliseconds(500), "a", 5);
  EXPECT_EQ(Find("a", absl::Milliseconds(499)), -1);
  EXPECT_EQ(Find("a", absl::Milliseconds(500)), 5);
}

TEST_F(KeptAnswersTest, AnotherEngineHasSaidNothing) {
  Keep("a", 5);
  EXPECT_EQ(Find("a", absl::Seconds(1), kEngine + 1), -1);
  Keep("a", 6, kEngine + 1);
  EXPECT_EQ(Find("a", absl::Seconds(1), kEngine + 1), 6);
  EXPECT_EQ(Find("a", absl::Seconds(1)), -1);
}

TEST_F(KeptAnswersTest, ALateAnswerReplacesNoNewerOne) {
  Keep("a", 6);
  KeepAskedAt(now_ - absl::Milliseconds(1), "a", 5);
  EXPECT_EQ(Find("a", absl::Seconds(1)), 6);
}

TEST_F(KeptAnswersTest, AClockThatWasSetBackMakesNothingYoung) {
  Keep("a", 5);
  now_ -= absl::Minutes(30);
  EXPECT_EQ(Find("a", absl::Seconds(1)), -1);
  Keep("a", 6);
  EXPECT_EQ(Find("a", absl::Seconds(1)), 6);
}

TEST_F(KeptAnswersTest, OldOnesAreDropped) {
  for (int i = 0; i < 100; ++i) Keep(absl::StrCat("job", i), 1);
  EXPECT_EQ(kept_.size(), 100u);
  now_ += 2 * KeptAnswers::kAgeMax;
  Keep("a", 5);
  EXPECT_EQ(kept_.size(), 1u);
}

}  // namespace
}  // namespace optstate::admin
