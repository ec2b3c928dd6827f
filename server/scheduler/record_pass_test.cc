#include "server/scheduler/record_pass.h"

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
  absl::StatusOr<Pin> PinSubGroup(size_t sub_group, Access access) override {
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

  bool fails = false;
  std::vector<uint8_t> wanted;
  std::vector<size_t> positions;

 private:
  storage::HostStore& store_;
};

TEST(RecordPassTest, ARecordInMemoryIsAtItsPosition) {
  SchedulerTestJob job({});
  RecordPass pass(&job.plan(), &job.memory());
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
  RecordPass pass(&job.plan(), &memory);
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

}  // namespace
}  // namespace optstate::scheduler
