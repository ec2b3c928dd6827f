// Has records brought up to date between steps, for an executor that keeps
// newer copies elsewhere.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/scheduler_test_job.h"
#include "server/scheduler/step_scheduler.h"
#include "storage/record_lag.h"
#include "storage/state_store.h"

namespace optstate::scheduler {
namespace {

// A store on which a pin may have to wait for a disk, or fail.
class DiskStore final : public storage::StateStore {
 public:
  explicit DiskStore(const Layout* layout)
      : storage::StateStore(layout, 2 * kTileElements, {}) {}
  bool is_resident() const override { return false; }
  bool pins_at_once() const override { return !waits; }
  absl::Status status() const override { return absl::OkStatus(); }
  absl::StatusOr<size_t> BeginPass(absl::Span<const uint8_t> wanted) override {
    if (fails) return absl::DataLossError("a bad disk");
    return wanted.size();
  }
  absl::StatusOr<Pin> PinOfPass(size_t position) override {
    return PinRecord(position, Access::kWrite);
  }

  bool waits = false;
  bool fails = false;

 private:
  absl::StatusOr<Pin> PinRecord(size_t sub_group, Access /*access*/) override {
    return Pin(storage::RecordView(&layout(), &sub_groups()[sub_group], {}));
  }
};

class KeepingExecutor final : public UpdateExecutor,
                              private storage::RecordLag {
 public:
  enum Copy : uint8_t { kNone, kAsNew, kNewer };

  explicit KeepingExecutor(const SubGroupTable* sub_groups)
      : copies(sub_groups->size()), sub_groups_(*sub_groups) {}
  absl::Status CanUpdate(const Layout&, Accumulation) const override {
    return absl::OkStatus();
  }
  size_t slots() const override { return 1; }
  storage::RecordLag* lag() override { return this; }
  void DropCopies() override {
    for (std::atomic<Copy>& copy : copies) copy = kNone;
  }
  // Every second one.
  bool IsDue(const SubGroup& sub_group) override {
    return IndexOf(sub_group) % 2 == 0 && copies[IndexOf(sub_group)] == kNewer;
  }
  void Reduce(const IndexRange&, ReduceTasks) override {}
  absl::Status Update(const IndexRange&, UpdateTasks*) override {
    return absl::OkStatus();
  }
  size_t Count(Copy copy) const {
    size_t count = 0;
    for (const std::atomic<Copy>& each : copies) count += each == copy ? 1 : 0;
    return count;
  }

  std::vector<std::atomic<Copy>> copies;  // by record

 private:
  size_t IndexOf(const SubGroup& sub_group) const {
    return static_cast<size_t>(&sub_group - sub_groups_.all().data());
  }
  bool Concerns(const SubGroup& sub_group, bool is_written) override {
    const Copy copy = copies[IndexOf(sub_group)];
    return copy == kNewer || (is_written && copy == kAsNew);
  }
  void MakeCurrent(const storage::RecordView& record,
                   bool is_written) override {
    copies[IndexOf(record.sub_group())] = is_written ? kNone : kAsNew;
  }

  const SubGroupTable& sub_groups_;
};

class StepSchedulerLagTest : public testing::Test {
 protected:
  StepSchedulerLagTest() {
    StepScheduler::Options options;
    options.store = &store_;
    options.grain_elements = kTileElements;
    options.recovery = job_.memory().recovery;
    options.control = &job_.control();
    options.undo = {reinterpret_cast<std::byte*>(job_.memory().undo.data()),
                    StepScheduler::WorkerUndoBytes(2)};
    options.redo = job_.memory().redo;
    options.speculation = job_.memory().speculation;
    options.pool = &job_.pool();
    options.executor = &executor_;
    scheduler_ = *StepScheduler::Create(options);
    store_.SetLag(executor_.lag());
    for (auto& copy : executor_.copies) copy = KeepingExecutor::kNewer;
  }

  SchedulerTestJob job_{{}};
  DiskStore store_{&job_.layout()};
  KeepingExecutor executor_{&store_.sub_groups()};
  std::unique_ptr<StepScheduler> scheduler_;
};

TEST_F(StepSchedulerLagTest, WhatIsDueIsDoneAhead) {
  const size_t records = executor_.copies.size();
  while (scheduler_->WorkAhead()) continue;
  EXPECT_EQ(executor_.Count(KeepingExecutor::kAsNew), (records + 1) / 2);
  EXPECT_EQ(executor_.Count(KeepingExecutor::kNewer), records / 2);
}

TEST_F(StepSchedulerLagTest, NothingIsDoneAheadThatADiskIsWaitedForIn) {
  store_.waits = true;
  EXPECT_FALSE(scheduler_->WorkAhead());
  EXPECT_EQ(executor_.Count(KeepingExecutor::kNewer), executor_.copies.size());
}

TEST_F(StepSchedulerLagTest, ACommitHasAllOfThem) {
  EXPECT_TRUE(scheduler_->CatchUp().ok());
  EXPECT_EQ(executor_.Count(KeepingExecutor::kAsNew), executor_.copies.size());
  EXPECT_TRUE(scheduler_->CatchUp().ok());
}

TEST_F(StepSchedulerLagTest, AStepIsForgottenOnceAllAreUpToDate) {
  job_.run_stamps()[0] = 7;
  store_.fails = true;
  EXPECT_EQ(scheduler_->ForgetStep(/*is_whole=*/false),
            absl::DataLossError("a bad disk"));
  EXPECT_EQ(job_.run_stamps()[0], 7u);
  store_.fails = false;
  EXPECT_TRUE(scheduler_->ForgetStep(/*is_whole=*/false).ok());
  EXPECT_EQ(executor_.Count(KeepingExecutor::kNone), executor_.copies.size());
  EXPECT_EQ(job_.run_stamps()[0], 0u);
}

// The records are not read that are to be cleared.
TEST_F(StepSchedulerLagTest, AStepOfRecordsThatAreClearedIsForgottenAtOnce) {
  store_.fails = true;
  EXPECT_TRUE(scheduler_->ForgetStep(/*is_whole=*/true).ok());
  EXPECT_EQ(executor_.Count(KeepingExecutor::kNone), executor_.copies.size());
}

}  // namespace
}  // namespace optstate::scheduler
