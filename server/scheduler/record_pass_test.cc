#include "server/scheduler/record_pass.h"

#include <algorithm>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/scheduler_test_job.h"

namespace optstate::scheduler {
namespace {

constexpr uint64_t kStep = 2;

// A store whose records could be swapped: keeps what is wanted of it.
class SwappedStore final : public storage::StateStore {
 public:
  explicit SwappedStore(storage::HostStore* store)
      : storage::StateStore(&store->layout(), 2 * kTileElements, {}),
        store_(*store) {}
  absl::Status status() const override { return absl::OkStatus(); }
  bool is_resident() const override { return false; }
  absl::StatusOr<Pin> PinRecord(size_t sub_group, Access access) override {
    return store_.PinSubGroup(sub_group, access);
  }
  absl::StatusOr<size_t> BeginPass(absl::Span<const uint8_t> which) override {
    if (fails) return absl::DataLossError("a bad disk");
    wanted.assign(which.begin(), which.end());
    return which.size();
  }
  absl::StatusOr<Pin> PinOfPass(size_t position) override {
    positions.push_back(position);
    return store_.PinOfPass(position);
  }

  bool is_durable() const override { return durable; }

  bool fails = false;
  bool durable = false;
  std::vector<uint8_t> wanted;
  std::vector<size_t> positions;

 private:
  storage::HostStore& store_;
};

// An executor that has copies of some runs' records elsewhere.
class KeepingExecutor final : public UpdateExecutor {
 public:
  absl::Status CanUpdate(const Layout&, Accumulation) const override {
    return absl::OkStatus();
  }
  size_t slots() const override { return 1; }
  bool NeedsRecord(uint64_t run, uint64_t /*step*/) override {
    return !kept.contains(run);
  }
  void Reduce(const IndexRange&, ReduceTasks) override {}
  absl::Status Update(const IndexRange&, UpdateTasks*) override {
    return absl::OkStatus();
  }

  std::set<uint64_t> kept;
};

TEST(RecordPassTest, ARecordInMemoryIsAtItsPosition) {
  SchedulerTestJob job({});
  KeepingExecutor executor;
  RecordPass pass(&job.plan(), &job.memory(), &executor);
  const auto positions = pass.Begin(job.UpdateOf(kStep));
  ASSERT_TRUE(positions.ok());
  EXPECT_EQ(*positions, job.store().sub_groups().size());
  EXPECT_EQ(&pass.Pin(3)->record().sub_group(), &job.store().sub_groups()[3]);
  EXPECT_EQ(&pass.Pin(0)->record().sub_group(), &job.store().sub_groups()[0]);
}

TEST(RecordPassTest, SwappedRecordsComeInOrderWhereSomethingIsToBeDone) {
  SchedulerTestJob job({});
  SwappedStore store(&job.store());
  StepMemory memory = job.memory();
  memory.store = &store;
  KeepingExecutor executor;
  RecordPass pass(&job.plan(), &memory, &executor);
  // Only parameter 5 is updated, and its first record has the step.
  job.SetUpdated({0, 0, 0, 0, 0, 1, 0});
  const SubGroup& first = store.sub_groups()[store.sub_groups().IndexOf(5, 0)];
  job.plan().ForEachRunOf(5, [&](uint64_t run, uint64_t begin, uint64_t) {
    if (job.layout().flat_offset(5) + begin < first.end) {
      job.run_stamps()[run] = kStep;
    }
  });
  ASSERT_TRUE(pass.Begin(job.UpdateOf(kStep)).ok());
  for (size_t i = 0; i < store.sub_groups().size(); ++i) {
    const bool has_rest = store.sub_groups()[i].end_parameter > 5 &&
                          store.sub_groups()[i].begin >= first.end;
    EXPECT_EQ(store.wanted[i], has_rest ? 1 : 0) << i;
  }
  EXPECT_TRUE(pass.Pin(3).ok());
  EXPECT_TRUE(pass.Pin(0).ok());
  EXPECT_EQ(store.positions, (std::vector<size_t>{0, 1}));
  ASSERT_TRUE(pass.Begin(job.UpdateOf(kStep)).ok());
  EXPECT_TRUE(pass.Pin(1).ok());
  EXPECT_EQ(store.positions.back(), 0u);
  store.fails = true;
  EXPECT_EQ(pass.Begin(job.UpdateOf(kStep)).status().message(), "a bad disk");
}

// Returns the number of positions of the pass whose records are not opened.
size_t CountUnopened(const RecordPass& pass, size_t positions) {
  size_t unopened = 0;
  while (unopened < positions && pass.Unopened(unopened) != nullptr) {
    ++unopened;
  }
  for (size_t i = unopened; i < positions; ++i) {
    EXPECT_EQ(pass.Unopened(i), nullptr) << i;
  }
  return unopened;
}

TEST(RecordPassTest, ASwappedRecordThatIsNotNeededIsNotOpened) {
  SchedulerTestJob job({});
  SwappedStore store(&job.store());
  StepMemory memory = job.memory();
  memory.store = &store;
  KeepingExecutor executor;
  RecordPass pass(&job.plan(), &memory, &executor);
  // Parameter 5 alone is updated, of which there are copies but for one run.
  job.SetUpdated({0, 0, 0, 0, 0, 1, 0});
  std::vector<uint64_t> runs;
  job.plan().ForEachRunOf(
      5, [&](uint64_t run, uint64_t, uint64_t) { runs.push_back(run); });
  executor.kept.insert(runs.begin(), runs.end() - 1);
  const uint64_t last = job.plan().numel(5) - 1;
  const uint32_t records =
      store.sub_groups().IndexOf(5, last) - store.sub_groups().IndexOf(5, 0);
  ASSERT_GT(records, 0u);
  // The store says that all are wanted of which it is asked for any.
  const auto wanted = [&] {
    return std::count(store.wanted.begin(), store.wanted.end(), 1);
  };
  auto positions = pass.Begin(job.UpdateOf(kStep));
  ASSERT_TRUE(positions.ok());
  EXPECT_EQ(CountUnopened(pass, *positions), records);
  EXPECT_EQ(pass.Unopened(0),
            &store.sub_groups()[store.sub_groups().IndexOf(5, 0)]);
  EXPECT_EQ(wanted(), 1);
  // A run that has the step needs nothing.
  job.run_stamps()[runs.back()] = kStep;
  positions = pass.Begin(job.UpdateOf(kStep));
  ASSERT_TRUE(positions.ok());
  EXPECT_EQ(wanted(), 0);
  // Values that are speculated about are kept first, from the record.
  StepUpdate speculative = job.UpdateOf(kStep);
  speculative.speculative = true;
  ASSERT_TRUE(pass.Begin(speculative).ok());
  EXPECT_EQ(pass.Unopened(0), nullptr);
  // A commit writes parameters that are their own masters with their records.
  store.durable = true;
  ASSERT_EQ(job.layout().master_format(5), MasterFormat::kParameter);
  ASSERT_TRUE(pass.Begin(job.UpdateOf(kStep)).ok());
  EXPECT_EQ(pass.Unopened(0), nullptr);
  ASSERT_EQ(job.layout().master_format(3), MasterFormat::kFloat32);
  job.plan().ForEachRunOf(
      3, [&](uint64_t run, uint64_t, uint64_t) { executor.kept.insert(run); });
  job.SetUpdated({0, 0, 0, 1, 0, 0, 0});
  ASSERT_TRUE(pass.Begin(job.UpdateOf(kStep)).ok());
  EXPECT_NE(pass.Unopened(0), nullptr);
}

}  // namespace
}  // namespace optstate::scheduler
