#include "server/scheduler/passes/lag_pass.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "server/scheduler/scheduler_test_job.h"
#include "storage/record_lag.h"
#include "storage/state_store.h"
#include "storage/tiers/host_store.h"

namespace optstate::scheduler {
namespace {

using storage::StateStore;

// A store that has records one by one, of which one may be damaged.
class PickyStore final : public StateStore {
 public:
  explicit PickyStore(storage::HostStore* store)
      : StateStore(&store->layout(), 2 * kTileElements, {}), store_(*store) {}
  absl::Status status() const override { return absl::OkStatus(); }
  bool is_resident() const override { return false; }
  absl::StatusOr<Pin> PinRecord(size_t sub_group, Access access) override {
    return store_.PinSubGroup(sub_group, access);
  }
  absl::StatusOr<size_t> BeginPass(absl::Span<const uint8_t> wanted) override {
    ++passes;
    pass_.clear();
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i] != 0) pass_.push_back(i);
    }
    return pass_.size();
  }
  absl::StatusOr<Pin> PinOfPass(size_t position) override {
    if (pass_[position] == damaged) return absl::DataLossError("a bad disk");
    return store_.PinOfPass(pass_[position]);
  }

  int passes = 0;
  size_t damaged = SIZE_MAX;

 private:
  storage::HostStore& store_;
  std::vector<size_t> pass_;
};

class CountingLag final : public storage::RecordLag {
 public:
  explicit CountingLag(const SubGroupTable* sub_groups)
      : sub_groups_(*sub_groups),
        lags(sub_groups->size()),
        made_current(sub_groups->size()) {}
  bool Concerns(const SubGroup& sub_group, bool is_written) override {
    return is_written || lags[IndexOf(sub_group)] != 0;
  }
  void MakeCurrent(const storage::RecordView& record,
                   bool is_written) override {
    ++made_current[IndexOf(record.sub_group())];
    was_written = is_written;
  }

 private:
  size_t IndexOf(const SubGroup& sub_group) const {
    for (size_t i = 0; i < sub_groups_.size(); ++i) {
      if (sub_groups_[i].begin == sub_group.begin) return i;
    }
    return sub_groups_.size();
  }

  const SubGroupTable& sub_groups_;

 public:
  std::vector<uint8_t> lags;                   // by record
  std::vector<std::atomic<int>> made_current;  // "
  std::atomic<bool> was_written{false};
};

class LagPassTest : public testing::Test {
 protected:
  absl::Status CatchUp(bool is_written) {
    return CatchUpRecords(&lag_, is_written, &store_, &job_.pool());
  }

  SchedulerTestJob job_{{}};
  PickyStore store_{&job_.store()};
  CountingLag lag_{&job_.store().sub_groups()};
};

TEST_F(LagPassTest, WhatLagsIsVisitedOnce) {
  lag_.lags[1] = lag_.lags[3] = 1;
  EXPECT_TRUE(CatchUp(/*is_written=*/false).ok());
  EXPECT_FALSE(lag_.was_written);
  for (size_t i = 0; i < lag_.lags.size(); ++i) {
    EXPECT_EQ(lag_.made_current[i], lag_.lags[i]) << i;
  }
  EXPECT_TRUE(CatchUp(/*is_written=*/true).ok());
  EXPECT_TRUE(lag_.was_written);
  for (size_t i = 0; i < lag_.lags.size(); ++i) {
    EXPECT_EQ(lag_.made_current[i], 1 + lag_.lags[i]) << i;
  }
}

TEST_F(LagPassTest, WithoutALagThereIsNoPass) {
  EXPECT_TRUE(CatchUp(/*is_written=*/false).ok());
  EXPECT_TRUE(
      CatchUpRecords(nullptr, /*is_written=*/true, &store_, &job_.pool()).ok());
  EXPECT_EQ(store_.passes, 0);
}

TEST_F(LagPassTest, ADamagedRecordLeavesTheOthersUpToDate) {
  store_.damaged = 2;
  EXPECT_EQ(CatchUp(/*is_written=*/true), absl::DataLossError("a bad disk"));
  for (size_t i = 0; i < lag_.lags.size(); ++i) {
    EXPECT_EQ(lag_.made_current[i], i == 2 ? 0 : 1) << i;
  }
}

}  // namespace
}  // namespace optstate::scheduler
