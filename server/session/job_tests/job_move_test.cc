// Jobs that take steps while their records move to other directories.
//
// A move is held at the first read of its copy where a test needs it to be
// under way: the file's other readers go on.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/captured_log.h"
#include "server/session/testing/held_read.h"
#include "server/session/testing/job_harness.h"
#include "server/session/testing/rearrange_fixture.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Reply = absl::StatusOr<v1::SetJobReply>;

class JobMoveTest : public RearrangeFixture {
 protected:
  // Opens the job with an I/O engine whose reads can be held.
  void Start() {
    on_disk_.Close();
    on_disk_.setup().io_engine = v1::IO_ENGINE_KIND_BLOCKING;
    ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
    StartBoth();
  }
  static bool LosesNothing() {
    return GetParam().durability == v1::DURABILITY_KIND_STEP;
  }
  uint64_t Arrangement() {
    return on_disk_.job().Describe().storage().arrangement();
  }
  // The move came to its end, or another call ended it.
  static void ExpectOverOrAborted(const Reply& reply) {
    EXPECT_TRUE(reply.ok() || absl::IsAborted(reply.status()))
        << reply.status();
  }
  void ExpectItGoesOn() {
    EXPECT_FALSE(on_disk_.job().Describe().has_record_rewrite());
    EXPECT_EQ(CountFolders(on_disk_),
              on_disk_.job().Describe().storage().directories());
    ExpectSameBits();
    TrainBoth();
    ExpectSameBits();
    Reopen(LosesNothing());
    ExpectSameBits();
    TrainBoth();
    ExpectSameBits();
  }

  Reply set_ = absl::UnknownError("not set yet");
};

TEST_P(JobMoveTest, AStepIsAnsweredWhileACopyIsHeld) {
  Start();
  const CapturedLog log;
  HeldRead held;
  std::thread act([&] { set_ = SetWeights(&on_disk_, {3, 1, 1}); });
  held.Await();
  // The copy waits for this step, not the step for the copy.
  TrainBoth();
  const v1::Job described = on_disk_.job().Describe();
  EXPECT_EQ(described.committed_step(), 3u);
  EXPECT_THAT(described.open_load(),
              HasSubstr("records are written anew, training goes on: "));
  EXPECT_TRUE(described.has_record_rewrite());
  EXPECT_EQ(described.storage().arrangement(), 0u);
  held.Release();
  act.join();
  ASSERT_TRUE(set_.ok()) << set_.status();
  EXPECT_GT(set_->moved_bytes(), 0u);
  EXPECT_EQ(Arrangement(), 1u);
  EXPECT_THAT(log.Text(),
              AllOf(HasSubstr("info records are written anew, training goes "
                              "on: job=test why=\"directory_weights\""),
                    ContainsRegex("info records were written anew: job=test "
                                  "[^\n]* bytes=[1-9][0-9]* ms=[0-9]+ "
                                  "waited_ms=[0-9]+")));
  ExpectItGoesOn();
}

TEST_P(JobMoveTest, StepsAndMovesGoOnSideBySideAndTheBitsStay) {
  StartBoth();
  const std::vector<Weights> all = {{3, 1, 1}, {1, 0, 0}, {0, 1, 5}, {1, 1, 1}};
  std::atomic<bool> is_over = false;
  std::thread mover([&] {
    for (const Weights& weights : all) {
      const Reply reply = SetWeights(&on_disk_, weights);
      EXPECT_TRUE(reply.ok()) << reply.status();
    }
    is_over = true;
  });
  do {
    TrainBoth();
  } while (!is_over);
  mover.join();
  EXPECT_EQ(Arrangement(), all.size());
  ExpectItGoesOn();
}

TEST_P(JobMoveTest, ADrainGivesItUp) {
  Start();
  HeldRead held;
  std::thread act([&] { set_ = SetWeights(&on_disk_, {3, 1, 1}); });
  held.Await();
  on_disk_.job().BeginDrain();
  held.Release();
  act.join();
  EXPECT_TRUE(absl::IsAborted(set_.status())) << set_.status();
  EXPECT_THAT(
      std::string(set_.status().message()),
      AllOf(HasSubstr("the records stay where they are"), HasSubstr("drains")));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(SetWeights(&on_disk_, {3, 1, 1}).status()));
  on_disk_.job().Resume();
  EXPECT_EQ(Arrangement(), 0u);
  ExpectItGoesOn();
  ASSERT_TRUE(SetWeights(&on_disk_, {3, 1, 1}).ok());
  ExpectItGoesOn();
}

TEST_P(JobMoveTest, TheEndOfTheEngineGivesItUp) {
  Start();
  HeldRead held;
  std::thread act([&] { set_ = SetWeights(&on_disk_, {3, 1, 1}); });
  held.Await();
  std::thread stop([&] { on_disk_.job().Stop(); });
  held.Release();
  act.join();
  stop.join();
  ExpectOverOrAborted(set_);
  Reopen(LosesNothing());
  ExpectItGoesOn();
}

// Equal weights wait for the move, others end it.
TEST_P(JobMoveTest, SeveralCallsAgreeOnOneArrangement) {
  Start();
  HeldRead held;
  std::thread act([&] { set_ = SetWeights(&on_disk_, {3, 1, 1}); });
  held.Await();
  std::vector<Reply> replies(3, absl::UnknownError("not set yet"));
  std::vector<std::thread> others;
  const Weights weights[] = {{3, 1, 1}, {6, 2, 2}, {1, 0, 0}};
  for (size_t i = 0; i < replies.size(); ++i) {
    others.emplace_back(
        [&, i] { replies[i] = SetWeights(&on_disk_, weights[i]); });
  }
  held.Release();
  act.join();
  for (std::thread& other : others) other.join();
  ExpectOverOrAborted(set_);
  bool is_any_over = set_.ok();
  for (const Reply& reply : replies) {
    ExpectOverOrAborted(reply);
    is_any_over |= reply.ok();
  }
  EXPECT_TRUE(is_any_over);
  ExpectItGoesOn();
  // The weights in force have nothing to be done, whatever was under way.
  const auto now = on_disk_.job().Describe().storage().directory_weights();
  Weights in_force(now.begin(), now.end());
  in_force.resize(kDisks, 0);
  if (now.empty()) in_force = {1, 0, 0};
  const Reply again = SetWeights(&on_disk_, in_force);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->moved_bytes(), 0u);
}

TEST_P(JobMoveTest, OtherSettingsChangeMeanwhileAndBothAreInForce) {
  if (GetParam().placement != v1::PLACEMENT_NVME) {
    GTEST_SKIP() << "it has no budget";
  }
  Start();
  HeldRead held;
  std::thread act([&] { set_ = SetWeights(&on_disk_, {3, 1, 1}); });
  held.Await();
  Reply budget = absl::UnknownError("not set yet");
  std::thread other([&] {
    v1::SetJobRequest request;
    request.set_host_budget_bytes(1 << 20);
    budget = on_disk_.job().Set(request);
  });
  held.Release();
  act.join();
  other.join();
  ASSERT_TRUE(set_.ok()) << set_.status();
  ASSERT_TRUE(budget.ok()) << budget.status();
  for (int i = 0; i < 2; ++i) {
    const v1::StorageSettings now = on_disk_.job().Describe().storage();
    EXPECT_EQ(now.host_budget_bytes(), uint64_t{1} << 20);
    EXPECT_THAT(now.directory_weights(), ElementsAre(3, 1, 1));
    EXPECT_EQ(now.arrangement(), 1u);
    ExpectItGoesOn();
  }
}

TEST_P(JobMoveTest, ParametersThatAreAddedEndIt) {
  Start();
  HeldRead held;
  std::thread act([&] { set_ = SetWeights(&on_disk_, {3, 1, 1}); });
  held.Await();
  absl::Status extended;
  std::thread extend([&] { extended = Extend(&on_disk_); });
  held.Release();
  act.join();
  extend.join();
  ExpectOverOrAborted(set_);
  ASSERT_EQ(extended, absl::OkStatus());
  ASSERT_EQ(Extend(&in_memory_), absl::OkStatus());
  for (JobHarness* job : {&in_memory_, &on_disk_}) LoadAdded(job);
  ExpectItGoesOn();
  ASSERT_TRUE(SetWeights(&on_disk_, {1, 0, 4}).ok());
  ExpectItGoesOn();
}

INSTANTIATE_TEST_SUITE_P(Kinds, JobMoveTest, testing::ValuesIn(kKinds), NameOf);

}  // namespace
}  // namespace optstate::session
