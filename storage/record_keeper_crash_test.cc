// Tests kept records after the death of a process at any store.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/persist_in_order.h"
#include "storage/record_keeper.h"
#include "storage/testing/kept_job.h"
#include "storage/testing/store_moments.h"

namespace optstate::storage {
namespace {

constexpr uint64_t kEpoch = 7;

// A user as speculation is one: it marks its step, keeps and overwrites some
// runs, stamps them, and rolls all of it back.
class Speculation {
 public:
  explicit Speculation(KeptJob* job) : job_(*job) {}

  void Begin() {
    keeper_ = job_.MakeKeeper();
    keeper_->Begin(kEpoch);
    job_.memory().mark().store(kEpoch);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  void Overwrite(const RunRange& run, std::mt19937_64* random) {
    keeper_->BeforeWrite(job_.RecordOf(run), kEpoch, run.parameter, run.begin,
                         run.numel);
    job_.Overwrite(run, random);
    job_.memory().stamp(run.run).store(kEpoch);
  }
  // Ends a speculation, as its engine does or the next one that finds it.
  void RollBack() {
    KeptMemory& memory = job_.memory();
    if (memory.mark().load() != kEpoch) return;
    keeper_ = job_.MakeKeeper();
    job_.RollBack(keeper_.get(), kEpoch, [&](const RunRange& run) {
      job_.FollowMasters(run);
      memory.stamp(run.run).store(0);
    });
    memory.mark().store(0);
  }

 private:
  KeptJob& job_;
  std::unique_ptr<RecordKeeper> keeper_;
};

class RecordKeeperCrashTest : public ::testing::Test {
 protected:
  RecordKeeperCrashTest() : random_(layouts_.Uniform(0, UINT64_MAX)) {}

  // Makes a job that had speculated about the same step before, so that its
  // memory has kept values which no longer count.
  void MakeJob(const JobKind& kind) {
    spec_.optimizer = kind.optimizer;
    spec_.state_format = kind.state_format;
    spec_.master_format = kind.master_format;
    spec_.groups = {{}, {}};
    const auto all =
        static_cast<uint32_t>((1 << InfoOf(kind.optimizer).options.size()) - 1);
    spec_.groups[1].options = all;
    spec_.parameters = {{.name = "matrix",
                         .shape = {30, 150},
                         .numel = 4500,
                         .dtype = DType::kBFloat16},
                        {.name = "b", .shape = {700}, .numel = 700},
                        {.name = "vector",
                         .shape = {600},
                         .numel = 600,
                         .dtype = DType::kBFloat16,
                         .group = 1}};
    job_ = std::make_unique<KeptJob>(*Layout::Make(spec_), 0);
    job_->OverwriteAll(&random_);
    const auto keeper = job_->MakeKeeper();
    for (const RunRange& run : job_->runs()) {
      keeper->BeforeWrite(job_->RecordOf(run), kEpoch, run.parameter, run.begin,
                          run.numel);
    }
    job_->OverwriteAll(&random_);
    original_.assign(job_->memory().state().begin(),
                     job_->memory().state().end());
  }
  std::vector<StoreMoment> WatchOne() {
    return WatchStores(job_->memory().all(), [&] {
      Speculation speculation(job_.get());
      speculation.Begin();
      for (const RunRange& run : job_->runs()) {
        if (run.run != 1) speculation.Overwrite(run, &random_);
      }
      speculation.RollBack();
    });
  }
  void Mix(const StoreMoment& from, const StoreMoment& to) {
    MixMoments(from, to, job_->memory().words_end(), layouts_.Uniform(0, 100),
               &random_, job_->memory().all());
  }
  // Rolls back and says whether all is as it was before the speculation.
  bool Recovers() {
    Speculation(job_.get()).RollBack();
    for (uint64_t run = 0; run < job_->layout().run_count(); ++run) {
      if (job_->memory().stamp(run).load() != 0) return false;
    }
    return job_->memory().mark().load() == 0 &&
           std::equal(original_.begin(), original_.end(),
                      job_->memory().state().begin());
  }
  RandomLayouts layouts_;
  std::mt19937_64 random_;
  LayoutSpec spec_;
  std::unique_ptr<KeptJob> job_;
  std::vector<std::byte> original_;
};

const std::set<PersistPoint> kPoints = {
    PersistPoint::kKeptEpochBegun, PersistPoint::kKeptEntry,
    PersistPoint::kKeptEntryStored, PersistPoint::kKeptEntryCleared};

TEST_F(RecordKeeperCrashTest, AnyStoreMayBeTheLast) {
  for (const JobKind& kind : AllJobKinds()) {
    MakeJob(kind);
    const std::vector<StoreMoment> moments = WatchOne();
    std::set<PersistPoint> reached;
    for (size_t i = 0; i + 1 < moments.size(); ++i) {
      if (i > 0) reached.insert(moments[i].point);
      EXPECT_TRUE(AllMixturesRecover(
          moments[i], moments[i + 1], job_->memory().words_end(), &random_,
          job_->memory().all(), [this] { return Recovers(); }))
          << InfoOf(kind.optimizer).name << " behind moment " << i << ", point "
          << static_cast<int>(moments[i].point);
    }
    EXPECT_EQ(reached, kPoints);
  }
}

// Without any one of the points, some order of stores is not recovered: so the
// test above would notice that it is missing.
TEST_F(RecordKeeperCrashTest, EachPointIsNeeded) {
  MakeJob(
      {OptimizerKind::kAdamW, StateFormat::kFloat32, MasterFormat::kFloat32});
  const std::vector<StoreMoment> moments = WatchOne();
  std::set<PersistPoint> needed;
  // A few orders alone might not show it.
  for (int round = 0; round < 50 && needed != kPoints; ++round) {
    needed.merge(NeededPoints(moments, job_->memory().words_end(), &random_,
                              job_->memory().all(),
                              [this] { return Recovers(); }));
  }
  EXPECT_EQ(needed, kPoints);
}

// The engine that rolls back dies too, at any point, again and again.
TEST_F(RecordKeeperCrashTest, ARollBackThatIsInterruptedIsRepeated) {
  for (const JobKind& kind : AllJobKinds()) {
    MakeJob(kind);
    const std::vector<StoreMoment> moments = WatchOne();
    for (int round = 0; round < 20; ++round) {
      const size_t at = layouts_.Uniform(0, moments.size() - 2);
      Mix(moments[at], moments[at + 1]);
      for (int death = 0; death < 4; ++death) {
        const std::vector<StoreMoment> again =
            WatchStores(job_->memory().all(),
                        [this] { Speculation(job_.get()).RollBack(); });
        const size_t last = layouts_.Uniform(0, again.size() - 2);
        Mix(again[last], again[last + 1]);
      }
      ASSERT_TRUE(Recovers()) << InfoOf(kind.optimizer).name;
    }
  }
}

int points_left = 0;
void KillAtPoint(PersistPoint /*point*/) {
  if (--points_left == 0) ::kill(::getpid(), SIGKILL);
}

// A process that shares the memory is killed at each point in turn.
TEST_F(RecordKeeperCrashTest, AKilledProcessLeavesWhatCanBeRolledBack) {
  MakeJob({OptimizerKind::kAdam, StateFormat::kDynamic8, MasterFormat::kSplit});
  const std::vector<std::byte> before(job_->memory().all().begin(),
                                      job_->memory().all().end());
  int killed = 0;
  for (int point = 1;; ++point) {
    std::copy(before.begin(), before.end(), job_->memory().all().begin());
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      points_left = point;
      persist_hook.store(&KillAtPoint);
      Speculation speculation(job_.get());
      speculation.Begin();
      for (const RunRange& run : job_->runs())
        speculation.Overwrite(run, &random_);
      speculation.RollBack();
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(Recovers()) << point;
    if (WIFEXITED(status)) break;
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
    ++killed;
  }
  // One at the beginning, two for each run that is kept, one for each that is
  // rolled back.
  EXPECT_EQ(killed, static_cast<int>(1 + 3 * job_->runs().size()));
}

}  // namespace
}  // namespace optstate::storage
