// Tests every call on a job that has no layout: none was registered yet, or its
// engine lost it. The job has no record, no arrays and no ranks.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/layout.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

JobHarness::Setup OneParameter() {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 100)};
  return setup;
}

class JobWithoutLayoutTest : public ::testing::Test {
 protected:
  Job& job() { return harness_.job(); }

  static void ExpectRefused(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  }

  JobHarness harness_{OneParameter()};
  RecordingListener listener_;
};

// A drain is cancelled before the engine has answered it.
TEST_F(JobWithoutLayoutTest, DrainingThatEndsMeanwhileIsSaidAtTheDeadline) {
  job().BeginDrain();
  job().Resume();
  const absl::Status drained = job().AwaitDrained(absl::InfinitePast());
  EXPECT_EQ(drained.code(), absl::StatusCode::kDeadlineExceeded) << drained;
  EXPECT_THAT(drained.message(), HasSubstr("was told to take steps again"));
}

TEST_F(JobWithoutLayoutTest, DrainsAndRestsAtOnce) {
  job().BeginDrain();
  EXPECT_TRUE(job().AwaitDrained(absl::InfinitePast()).ok());
  EXPECT_EQ(job().AwaitResumed(absl::InfinitePast()).code(),
            absl::StatusCode::kDeadlineExceeded);
  job().Resume();
  EXPECT_TRUE(job().AwaitResumed(absl::InfinitePast()).ok());
  EXPECT_TRUE(job().Pause(absl::InfinitePast(), absl::InfiniteDuration()).ok());
  EXPECT_TRUE(job().paused());
  job().Resume();
}

TEST_F(JobWithoutLayoutTest, RanksAreRefused) {
  AttachSpec attach;
  attach.listener = &listener_;
  ExpectRefused(job().Attach(attach).status());
  ExpectRefused(job().Push(0, 1, 0, 0, 1));
  ExpectRefused(job().Abort(0, 1));
  ExpectRefused(job().BeginLoad(0));
  float value = 0;
  ExpectRefused(
      job().Load(0, v1::STATE_ARRAY_MASTER, 0, 0, 1, DType::kFloat32,
                 {reinterpret_cast<const std::byte*>(&value), sizeof(value)}));
  // There is no rank to answer.
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  CommitSpec commit;
  commit.step = 1;
  commit.groups = groups;
  job().Commit(0, 1, commit);
  job().EndMicroStep(0, 2, 1, 0);
  job().FinishLoad(0, 3, {});
  job().Detach(0);
  job().Leave(0);
  job().NoteFarewell(0, 7);
  job().GiveUp({.rank = 0, .client_instance = 7});
  for (uint64_t request = 1; request <= 3; ++request) {
    EXPECT_EQ(listener_.Find(request), nullptr);
  }
  EXPECT_THAT(job().Awaited(), IsEmpty());
  EXPECT_FALSE(job().finished());
}

TEST_F(JobWithoutLayoutTest, ThereIsNothingToRead) {
  std::byte bytes[4];
  ExpectRefused(job().layout().status());
  ExpectRefused(job().partition(0).status());
  ExpectRefused(job().OpenParameters().status());
  ExpectRefused(job().OpenRunStamps().status());
  ExpectRefused(job().ShareParameters("emulated-0").status());
  ExpectRefused(
      job()
          .Fetch(v1::STATE_ARRAY_MASTER, 0, 0, 1, absl::MakeSpan(bytes))
          .status());
  ExpectRefused(job().ReadParameters(0, absl::MakeSpan(bytes)));
  ExpectRefused(job().ListParameters({}).status());
  EXPECT_EQ(job().Describe().phase(), v1::JOB_PHASE_EMPTY);
}

}  // namespace
}  // namespace optstate::session
