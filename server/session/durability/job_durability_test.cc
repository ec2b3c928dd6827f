#include "server/session/durability/job_durability.h"

#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/durability/commit_period.h"
#include "server/session/durability/store_maker.h"
#include "server/session/monotonic_clock.h"
#include "server/session/testing/room_fixture.h"
#include "server/session/testing/scoped_file_limit.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A job whose records are on disk; each test says when it is durable.
class JobDurabilityTest : public RoomTest<LowerRooms> {
 protected:
  JobDurabilityTest() : RoomTest(std::nullopt) {
    std::filesystem::create_directory(disk());
    job_.options.config.mutable_nvme()->add_directories(disk());
    job_.options.config.mutable_nvme()->set_io_engine(
        v1::IO_ENGINE_KIND_BLOCKING);
  }

  std::string disk() const { return directory_ + "/disk"; }
  void Make(v1::DurabilityKind kind) {
    RegisterSpec spec = TwoRanks();
    spec.storage.set_placement(v1::PLACEMENT_NVME);
    spec.storage.set_durability(kind);
    if (kind == v1::DURABILITY_KIND_EVERY) spec.storage.set_every_steps(3);
    if (kind == v1::DURABILITY_KIND_INTERVAL) {
      spec.storage.set_interval_ms(1000);
    }
    const absl::Status made = Register(spec).status();
    ASSERT_TRUE(made.ok()) << made;
    MakeReady();
  }
  void SetStep(uint64_t step) {
    storage::StepRecord record = job_.record();
    record.committed_step = step;
    storage::PublishRecord(record, job_.tier->control());
  }
  // Takes a step that changes nothing, and returns the step that is durable
  // once all that was requested is.
  uint64_t DurableAfter(uint64_t step, bool is_load = false) {
    SetStep(step);
    JobCall lock(&job_.lock);
    EXPECT_TRUE(durability_.MakeDurableIfDue(is_load).ok());
    EXPECT_TRUE(job_.store->AwaitCommit().ok());
    return job_.store->durable_step();
  }
  uint64_t commits() const {
    return job_.store->swap_state()->counters.commits;
  }
  absl::Status AdoptCommit() {
    JobCall lock(&job_.lock);
    return durability_.AdoptCommit();
  }
  void CommitFinally(bool loading = false) {
    JobCall lock(&job_.lock);
    durability_.CommitFinally(loading);
  }
};

// A clock that somebody sets would make steps durable too early or too late.
TEST(JobClockTest, IntervalsGoByAMonotonicClock) {
  const absl::Time before = MonotonicNow();
  const absl::Time now = Job::Options().clock();
  EXPECT_LE(before, now);
  EXPECT_LE(now, MonotonicNow());
}

TEST_F(JobDurabilityTest, EachStep) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_STEP));
  for (uint64_t step = 1; step <= 3; ++step) {
    SetStep(step);
    JobCall lock(&job_.lock);
    ASSERT_TRUE(durability_.MakeDurableIfDue(/*is_load=*/false).ok());
    EXPECT_EQ(job_.store->durable_step(), step) << "before it is answered";
  }
}

TEST(CommitPeriodTest, ALossOfPowerCostsAsManySteps) {
  for (uint32_t every = 1; every <= 20; ++every) {
    v1::StorageSettings storage;
    storage.set_every_steps(every);
    const uint64_t period = CommitPeriodSteps(storage);
    // Each commit is durable when the next one begins, and not before; a step
    // is answered after that.
    uint64_t requested = 0, durable = 0;
    for (uint64_t step = 1; step <= 100; ++step) {
      if (step % period == 0) {
        durable = requested;
        requested = step;
      }
      EXPECT_LE(step - durable, every) << "step " << step;
    }
  }
}

TEST_F(JobDurabilityTest, EveryThirdStep) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_EVERY));
  for (uint64_t step = 1; step <= 7; ++step) {
    EXPECT_EQ(DurableAfter(step), step / 2 * 2);
  }
  EXPECT_EQ(DurableAfter(7, /*is_load=*/true), 7u);
}

TEST_F(JobDurabilityTest, EverySecond) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_INTERVAL));
  EXPECT_EQ(DurableAfter(1), 1u) << "the first";
  now_ += absl::Milliseconds(999);
  EXPECT_EQ(DurableAfter(2), 1u);
  now_ += absl::Milliseconds(1);
  EXPECT_EQ(DurableAfter(3), 3u);
  EXPECT_EQ(DurableAfter(4), 3u);
}

TEST_F(JobDurabilityTest, NowWhenItIsNotTheTurnOfTheStep) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_EVERY));
  SetStep(5);
  JobCall lock(&job_.lock);
  ASSERT_TRUE(durability_.MakeDurableNow().ok());
  EXPECT_EQ(job_.store->durable_step(), 5u) << "before it is answered";
}

TEST_F(JobDurabilityTest, NoneOfAJobThatIsNotOrIsNotLoaded) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_STEP));
  storage::StepRecord record = job_.record();
  record.load_required_from = 1;
  storage::PublishRecord(record, job_.tier->control());
  EXPECT_EQ(DurableAfter(1, /*is_load=*/true), 0u);
  CommitFinally();
  EXPECT_TRUE(AdoptCommit().ok());
  {
    JobCall lock(&job_.lock);
    EXPECT_TRUE(durability_.MakeDurableNow().ok());
  }
  EXPECT_EQ(commits(), 0u);
}

TEST_F(JobDurabilityTest, NoneOfARecordedStepThatIsNotDurableByChoice) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_NONE));
  EXPECT_EQ(DurableAfter(1, /*is_load=*/true), 0u);
  CommitFinally();
  EXPECT_EQ(commits(), 0u);
}

// The former engine had recorded the step, and answered no rank.
TEST_F(JobDurabilityTest, AStepOfTheFormerEngineIsMadeDurable) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_STEP));
  ASSERT_EQ(DurableAfter(1), 1u);
  SetStep(2);
  job_.recovery.emplace();
  ASSERT_TRUE(AdoptCommit().ok());
  EXPECT_EQ(job_.store->durable_step(), 1u) << "it is being finished";
  job_.recovery.reset();
  ASSERT_TRUE(AdoptCommit().ok());
  EXPECT_EQ(job_.store->durable_step(), 2u);
}

// A load has no step of its own, and is made durable nevertheless.
TEST_F(JobDurabilityTest, SoIsALoad) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_STEP));
  ASSERT_EQ(DurableAfter(1), 1u);
  storage::StepRecord record = job_.record();
  ++record.loads_finished;
  storage::PublishRecord(record, job_.tier->control());
  ASSERT_TRUE(AdoptCommit().ok());
  EXPECT_EQ(commits(), 2u);
}

// The job has begun at a step after as many loads as it had before.
TEST_F(JobDurabilityTest, SoIsALoadThatBringsAStep) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_INTERVAL));
  ASSERT_EQ(DurableAfter(0, /*is_load=*/true), 0u);
  SetStep(2);
  ASSERT_TRUE(AdoptCommit().ok());
  const auto await = [this] {
    JobCall lock(&job_.lock);
    return job_.store->AwaitCommit();
  };
  ASSERT_TRUE(await().ok());
  EXPECT_EQ(job_.store->durable_step(), 2u);
  // A step that ranks have committed waits for its turn.
  storage::StepRecord record = job_.record();
  record.committed_step = 3;
  record.commit_digest = 7;
  storage::PublishRecord(record, job_.tier->control());
  ASSERT_TRUE(AdoptCommit().ok());
  ASSERT_TRUE(await().ok());
  EXPECT_EQ(job_.store->durable_step(), 2u);
}

TEST_F(JobDurabilityTest, AnOrderlyEndLosesNothing) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_EVERY));
  ASSERT_EQ(DurableAfter(4), 4u);
  SetStep(5);
  CommitFinally(/*loading=*/true);
  job_.failure = absl::DataLossError("why");
  CommitFinally();
  job_.failure = absl::OkStatus();
  EXPECT_EQ(job_.store->durable_step(), 4u);
  CommitFinally();
  EXPECT_EQ(job_.store->durable_step(), 5u);
  const uint64_t before = commits();
  CommitFinally();
  EXPECT_EQ(commits(), before) << "it is durable";
}

TEST_F(JobDurabilityTest, ADiskThatRefusesFailsTheJob) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_STEP));
  ASSERT_EQ(DurableAfter(1), 1u);
  SetStep(2);
  absl::Status failed;
  {
    const ScopedFileLimit limit(0);
    JobCall lock(&job_.lock);
    failed = durability_.MakeDurableIfDue(/*is_load=*/false);
  }
  EXPECT_FALSE(failed.ok());
  EXPECT_THAT(failed.message(), HasSubstr("the durable commit of step 2"));
  EXPECT_EQ(job_.failure, failed);
  EXPECT_EQ(job_.store->durable_step(), 1u);
  EXPECT_EQ(job_.LastOutcome().durable_step, 1u);
}

TEST_F(JobDurabilityTest, AJobOnDiskNeedsTheDaemonsDirectory) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_NONE));
  job_.options.config.mutable_nvme()->clear_directories();
  const absl::Status refused = MakeStore(&job_, nullptr).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(), HasSubstr("--nvme-dir"));
}

TEST_F(JobDurabilityTest, TheDiskIsDescribed) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::DURABILITY_KIND_STEP));
  ASSERT_EQ(DurableAfter(1), 1u);
  v1::DiskState described;
  durability_.DescribeDisk(&described);
  EXPECT_EQ(described.io_engine(), "blocking");
  EXPECT_THAT(described.directories(), ElementsAre(disk() + "/jobs/test"));
  EXPECT_EQ(described.durable_step(), 1u);
  EXPECT_EQ(described.commits(), 1u);
  EXPECT_GT(described.directory_io(0).syncs(), 0u);
  EXPECT_GT(described.directory_io(0).busy_ns(), 0u);
}

}  // namespace
}  // namespace optstate::session
