// Scrubs of a job: verifications that nobody asks for.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/synchronization/mutex.h"
#include "server/session/durability/record_scrubber.h"
#include "server/session/testing/captured_log.h"
#include "server/session/testing/disk_job_fixture.h"
#include "server/session/testing/held_read.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kIntervalS = 7 * 24 * 60 * 60;

class JobScrubTest : public DiskJobFixture {
 protected:
  ~JobScrubTest() override { job_ = nullptr; }  // it reads

  // The records are in memory too, so that steps read nothing from disk.
  void StartWith(uint64_t bytes_per_s) {
    JobHarness::Setup setup =
        DiskJobSetup(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_STEP);
    setup.scrub_interval_s = kIntervalS;
    setup.scrub_bytes_per_s = bytes_per_s;
    setup.clock = [this] { return Now(); };
    Start(setup);
    const absl::MutexLock lock(&mu_);
    reads_before_ = reads_;
  }
  absl::Time Now() {
    const absl::MutexLock lock(&mu_);
    ++looks_;
    return absl::FromUnixSeconds(now_s_);
  }
  // Moves the clock, and lets the scrubber look at it.
  void Leap(int64_t seconds) {
    now_s_ += seconds;
    job_->job().Resume();
  }
  v1::DiskState Disk() const { return job_->job().Describe().disk(); }
  // A scrub looks at the clock as it ends.
  void AwaitScrub() {
    while (true) {
      mu_.Lock();
      const int looks = looks_;
      mu_.Unlock();
      if (Disk().scrubs() != 0) return;
      const auto looked = [&] { return looks_ != looks; };
      const absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&looked));
    }
  }
  // Waits until a scrub reads, which nothing else does.
  void AwaitRead() {
    const absl::MutexLock lock(&mu_);
    const auto has_read = [&] { return reads_ != reads_before_; };
    mu_.Await(absl::Condition(&has_read));
  }

  std::atomic<int64_t> now_s_ = 1'000'000'000;
  absl::Mutex mu_;
  int looks_ = 0;
  int reads_ = 0;
  int reads_before_ = 0;
  const ReadHook hook_{[this] {
    const absl::MutexLock lock(&mu_);
    ++reads_;
  }};
};

TEST_F(JobScrubTest, ComesAfterTheInterval) {
  StartWith(/*bytes_per_s=*/0);
  Leap(kIntervalS - 1);
  EXPECT_FALSE(Disk().has_last_verified_at());
  Leap(1);
  AwaitScrub();
  EXPECT_EQ(Disk().last_verified_at().seconds(), now_s_);
  EXPECT_EQ(Disk().damaged_records(), 0u);
  const uint64_t records = Disk().records();
  const absl::MutexLock lock(&mu_);
  EXPECT_GE(reads_ - reads_before_, static_cast<int>(records));
}

TEST_F(JobScrubTest, TheIntervalCountsOverEnginesAndPowerCuts) {
  StartWith(/*bytes_per_s=*/0);
  constexpr int64_t kPart = kIntervalS / 3;
  for (const bool loses_power : {false, true}) {
    now_s_ += kPart;
    job_->Close();
    if (loses_power) job_->DropMemory();
    ASSERT_TRUE(job_->Open().ok());
    EXPECT_FALSE(Disk().has_last_verified_at());
  }
  Leap(kIntervalS - 2 * kPart - 1);
  EXPECT_EQ(Disk().scrubs(), 0u);
  Leap(1);
  AwaitScrub();
  const int64_t verified_at = now_s_;
  job_->Close();
  now_s_ += 5;
  ASSERT_TRUE(job_->Open().ok());
  EXPECT_EQ(Disk().scrubs(), 0u) << "of this engine";
  EXPECT_EQ(Disk().last_verified_at().seconds(), verified_at);
}

TEST_F(JobScrubTest, GivesWayToAnOperator) {
  StartWith(/*bytes_per_s=*/1);
  Leap(kIntervalS);
  AwaitRead();
  const Verified verified = Verify(job_.get());
  EXPECT_TRUE(verified.status.ok()) << verified.status;
  EXPECT_TRUE(verified.last.done());
  EXPECT_EQ(Disk().last_verified_at().seconds(), now_s_);
  EXPECT_EQ(Disk().scrubs(), 0u);
}

TEST_F(JobScrubTest, DamageIsToldAndTrainingGoesOn) {
  const CapturedLog log;
  StartWith(/*bytes_per_s=*/0);
  Flip(6, kTileElements * 4 + 8);
  Leap(kIntervalS);
  AwaitScrub();
  EXPECT_EQ(Disk().damaged_records(), 1u);
  EXPECT_EQ(job_->job().Describe().phase(), v1::JOB_PHASE_READY);
  // Each step writes one slot of each record.
  Train(job_.get(), 3, 4);
  EXPECT_TRUE(Verify(job_.get()).status.ok());
  EXPECT_EQ(Disk().damaged_records(), 0u);
  job_->Close();
  for (const std::string& text :
       {"error verification: " + RecordsFile() + ": the record at byte ",
        std::string("tile 1, of parameters \"b\" to \"b\""),
        std::string("load the job anew from a checkpoint. `optctl verify "
                    "test` looks")}) {
    EXPECT_THAT(log.Text(), HasSubstr(text));
  }
}

// A scrub that read on to its end would take hours.
TEST_F(JobScrubTest, EndsWithTheJob) {
  for (const bool stops_first : {true, false}) {
    StartWith(/*bytes_per_s=*/1);
    const auto records = static_cast<int>(Disk().records());
    Leap(kIntervalS);
    AwaitRead();
    if (stops_first) job_->job().Stop();
    job_->Close();
    const absl::MutexLock lock(&mu_);
    EXPECT_LT(reads_ - reads_before_, records);
  }
}

TEST_F(JobScrubTest, ComesBackAfterADrain) {
  StartWith(/*bytes_per_s=*/1);
  Leap(kIntervalS);
  AwaitRead();
  job_->job().BeginDrain();
  EXPECT_TRUE(job_->job().AwaitDrained(absl::InfiniteFuture()).ok());
  int looks = 0;
  int reads = 0;
  const auto has_read = [&] { return reads_ != reads; };
  const auto has_looked_or_read = [&] { return looks_ != looks || has_read(); };
  // The scrubber has noted the end of the former scrub before it looks at the
  // new time.
  for (bool is_back = false; !is_back;) {
    {
      const absl::MutexLock lock(&mu_);
      if (reads == 0) reads = reads_;
      looks = looks_;
    }
    Leap(absl::ToInt64Seconds(RecordScrubber::kRetry));
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&has_looked_or_read));
    is_back = has_read();
  }
  EXPECT_FALSE(Disk().has_last_verified_at());
}

TEST_F(JobScrubTest, AJobInMemoryHasNone) {
  JobHarness::Setup setup =
      DiskJobSetup(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_NONE);
  setup.scrub_interval_s = kIntervalS;
  setup.clock = [this] { return Now(); };
  Start(setup);
  for (int i = 0; i < 3; ++i) Leap(kIntervalS);
  Train(job_.get(), 3, 3);
  EXPECT_FALSE(job_->job().Describe().has_disk());
}

}  // namespace
}  // namespace optstate::session
