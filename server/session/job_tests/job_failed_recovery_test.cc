// The disk does not read while the step in which an engine died is finished:
// the job is FAILED, with nothing of the recovery under way, and the next
// engine goes on once the disk reads again.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/session/testing/job_crash_fixture.h"

// While set, records below this directory cannot be read.
static std::atomic<const std::string*> unreadable = nullptr;

ssize_t RealRead(int fd, void* to, size_t bytes, off_t at) asm("__real_pread");
ssize_t WrappedRead(int fd, void* to, size_t bytes,
                    off_t at) asm("__wrap_pread");
ssize_t WrappedRead(int fd, void* to, size_t bytes, off_t at) {
  constexpr off_t kFirstRecord = 4096;  // behind what says whose the file is
  const std::string* directory = unreadable;
  if (directory != nullptr && at >= kFirstRecord) {
    char path[4096] = {};
    const std::string link = absl::StrCat("/proc/self/fd/", fd);
    if (::readlink(link.c_str(), path, sizeof(path) - 1) > 0 &&
        absl::StartsWith(path, *directory)) {
      errno = EIO;
      return -1;
    }
  }
  return RealRead(fd, to, bytes, at);
}

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

JobHarness::Setup OnDisk() {
  JobHarness::Setup setup = TwoRanks();
  setup.storage.set_placement(v1::PLACEMENT_NVME);
  setup.io_engine = v1::IO_ENGINE_KIND_BLOCKING;  // its reads can fail
  return setup;
}

class JobFailedRecoveryTest : public JobCrashTest {
 protected:
  JobFailedRecoveryTest() : JobCrashTest(OnDisk()) {}
  ~JobFailedRecoveryTest() override { unreadable = nullptr; }

  // Opens the job with the gradients of these ranks kept.
  void OpenWithGradientsOf(const std::vector<uint32_t>& ranks) {
    ASSERT_TRUE(harness_.Open().ok());  // only to know the sizes
    RememberGradients();
    std::vector<KeptGradients> kept;
    for (const uint32_t rank : ranks) {
      kept.push_back(harness_.KeepGradients(rank, 4096));
    }
    harness_.Close();
    ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
  }
  // Reopens with rank 0's gradients kept, and fails as rank 1 brings its own.
  void FailAsRank1Attaches() {
    ASSERT_NO_FATAL_FAILURE(DieInStep3(Instant::kMarked));
    ASSERT_NO_FATAL_FAILURE(OpenWithGradientsOf({0}));
    ASSERT_TRUE(harness_.Register(1).ok());
    AttachSpec spec = harness_.AttachSpecOf(1);
    const KeptGradients own = harness_.KeepGradients(1, 4096);
    spec.gradient_segment = own.segment.get();
    spec.gradient_offset_bytes = 4096;
    unreadable = &harness_.disk();
    const auto attached = harness_.job().Attach(spec);
    ASSERT_TRUE(attached.ok()) << attached.status();
    EXPECT_EQ(attached->phase, v1::JOB_PHASE_FAILED);
  }
  void ExpectFailedAndNothingUnderWay() {
    const v1::Job job = harness_.job().Describe();
    EXPECT_EQ(job.phase(), v1::JOB_PHASE_FAILED);
    EXPECT_THAT(job.reason(), HasSubstr("cannot finish step 3"));
    EXPECT_EQ(job.open_step(), "");
    EXPECT_EQ(job.committed_step(), 2);
    harness_.job().BeginDrain();
    const absl::Status drained =
        harness_.job().AwaitDrained(absl::InfinitePast());
    EXPECT_TRUE(drained.ok()) << drained;
    harness_.job().Resume();
    const absl::Status paused =
        harness_.job().Pause(absl::InfinitePast(), absl::ZeroDuration());
    EXPECT_TRUE(paused.ok()) << paused;
  }
  // Expects that an engine with these gradients finishes the step.
  void ExpectFinishedWithGradientsOf(const std::vector<uint32_t>& ranks) {
    harness_.Close();
    unreadable = nullptr;
    ASSERT_NO_FATAL_FAILURE(OpenWithGradientsOf(ranks));
    EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
    EXPECT_EQ(committed_step(), 3);
    EXPECT_TRUE(harness_.StateBytes() == expected_);
  }
};

TEST_F(JobFailedRecoveryTest, AsTheJobIsOpened) {
  DieInStep3(Instant::kMarked);
  ASSERT_TRUE(harness_.Open().ok());  // only to know the sizes
  RememberGradients();
  std::vector<KeptGradients> kept;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    kept.push_back(harness_.KeepGradients(rank, 4096));
  }
  harness_.Close();
  unreadable = &harness_.disk();
  ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
  ExpectFailedAndNothingUnderWay();
  EXPECT_EQ(harness_.kept().size(), 2u);
  ExpectFinishedWithGradientsOf({0, 1});
}

TEST_F(JobFailedRecoveryTest, AsTheLastRankAttaches) {
  ASSERT_NO_FATAL_FAILURE(FailAsRank1Attaches());
  ExpectFailedAndNothingUnderWay();
  // The step is the next engine's, and with it the gradients of a rank that
  // ends because of the failure; no other shape of the job fits them.
  harness_.Detach(1);
  EXPECT_EQ(harness_.kept().size(), 2u);
  harness_.setup().world_size = 1;
  EXPECT_THAT(harness_.Register(0).status().message(),
              HasSubstr("cannot finish step 3"));
  harness_.setup().world_size = 2;
  ExpectFinishedWithGradientsOf({0, 1});
}

TEST_F(JobFailedRecoveryTest, AnAttachedRankLoadsTheJobAnew) {
  ASSERT_NO_FATAL_FAILURE(FailAsRank1Attaches());
  unreadable = nullptr;
  const absl::Status begun = harness_.job().BeginLoad(1);
  EXPECT_TRUE(begun.ok()) << begun;
  EXPECT_EQ(phase(), v1::JOB_PHASE_LOADING);
  ASSERT_TRUE(harness_.Register(0).ok());
  ASSERT_TRUE(harness_.Attach(0).ok());
  harness_.LoadMasters(harness_.RandomTensors(5));
  EXPECT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  harness_.Step(3, harness_.RandomTensors(3), CommitOf(3));
}

}  // namespace
}  // namespace optstate::session
