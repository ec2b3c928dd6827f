// Tests a frame table after the death of a process at any store.

#include "storage/tiers/nvme/frame_table.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "storage/io/test_seed.h"
#include "storage/persist_in_order.h"
#include "storage/testing/store_moments.h"

namespace optstate::nvme {
namespace {

constexpr uint32_t kRecords = 5;
constexpr uint32_t kFrames = 3;
constexpr uint32_t kChecksums = 7;
// A record is so many words, each of which is its version.
constexpr uint32_t kWords = 8;

FrameTable::Shape ShapeOf() {
  FrameTable::Shape shape;
  shape.incarnation = 99;
  shape.records = kRecords;
  shape.checksums = kChecksums;
  shape.frames = kFrames;
  shape.frame_bytes = kWords * sizeof(uint64_t);
  shape.slots = 1;
  return shape;
}

// A store in small: a table, frames and slots, in one block of memory.
class SmallStore {
 public:
  SmallStore()
      : table_bytes_((FrameTable::BytesNeeded(ShapeOf()) + 63) / 64 * 64),
        memory_(table_bytes_ / sizeof(uint64_t) +
                (kFrames + kRecords) * kWords + 1) {
    for (uint32_t record = 0; record < kRecords; ++record) {
      versions_[record] = (record + 1) * 1000;
      std::fill_n(Slot(record), kWords, versions_[record]);
    }
  }

  absl::Span<std::byte> memory() {
    return {reinterpret_cast<std::byte*>(memory_.data()),
            memory_.size() * sizeof(uint64_t)};
  }
  FrameTable table() { return FrameTable(memory().first(table_bytes_)); }
  void Make() {
    // Memory of a new file is zero; what is not stored would be noticed.
    table().Make(ShapeOf());
  }

  // Brings a record to a frame, as after a read.
  void Load(uint32_t record, uint32_t frame) {
    std::copy_n(Slot(record), kWords, Frame(frame));
    RecordPlace place = table().place(record);
    place.frame = frame;
    table().SetPlace(record, place);
  }
  void GiveUp(uint32_t record) {
    RecordPlace place = table().place(record);
    place.frame = RecordPlace::kNoFrame;
    table().SetPlace(record, place);
  }
  // Gives a record in a frame its next version.
  void Update(uint32_t record) {
    RecordPlace place = table().place(record);
    place.is_dirty = true;
    table().SetPlace(record, place);
    std::fill_n(Frame(place.frame), kWords, ++versions_[record]);
  }
  void Write(uint32_t record) {
    RecordPlace place = table().place(record);
    std::copy_n(Frame(place.frame), kWords, Slot(record));
    place.is_dirty = false;
    place.is_on_disk = true;
    table().SetPlace(record, place);
  }
  // The sync's beginning and end are marked as its requests would be.
  void Sync() {
    table().SetSyncing(true);
    sync() = kSyncBegun;
    storage::PersistInOrder(storage::PersistPoint::kCount);
    sync() = kSyncDone;
    table().SetSyncing(false);
  }

  // Says whether an engine that opens the table finds each record whole.
  bool IsSound() {
    if (!FrameTable::IsMade(memory())) return true;
    if (!table().Check(ShapeOf()).ok()) return false;
    for (uint32_t record = 0; record < kRecords; ++record) {
      const RecordPlace place = table().place(record);
      const uint64_t* const words = place.frame != RecordPlace::kNoFrame
                                        ? Frame(place.frame)
                                        : Slot(record);
      for (uint32_t i = 0; i < kWords; ++i) {
        // An update in flight is recovered by stamps and undo.
        const bool is_old = place.is_dirty && words[i] + 1 == words[0];
        const bool is_new = place.is_dirty && words[i] == words[0] + 1;
        if (words[i] != words[0] && !is_old && !is_new) return false;
        if (words[i] / 1000 != record + 1) return false;
        if (!place.is_dirty && words[i] != Slot(record)[i]) return false;
      }
    }
    return sync() != kSyncBegun || table().is_syncing();
  }

 private:
  static constexpr uint64_t kSyncBegun = 1;
  static constexpr uint64_t kSyncDone = 2;

  uint64_t* Frame(uint32_t frame) {
    return &memory_[table_bytes_ / sizeof(uint64_t) + frame * kWords];
  }
  uint64_t* Slot(uint32_t record) { return Frame(kFrames + record); }
  uint64_t& sync() { return *Slot(kRecords); }

  uint64_t table_bytes_;
  std::vector<uint64_t> memory_;
  std::array<uint64_t, kRecords> versions_ = {};
};

class FrameTableTest : public ::testing::Test {
 protected:
  FrameTableTest() : random_(io::TestSeed()) {}

  uint32_t Below(uint32_t end) {
    return static_cast<uint32_t>(random_() % end);
  }
  // Makes a table and does, in some order, all that a store does with it.
  std::vector<storage::StoreMoment> WatchOne() {
    return storage::WatchStores(store_.memory(), [this] {
      store_.Make();
      for (int i = 0; i < 60; ++i) DoSomething();
    });
  }
  void DoSomething() {
    const uint32_t record = Below(kRecords);
    const RecordPlace place = store_.table().place(record);
    if (place.frame == RecordPlace::kNoFrame) {
      std::set<uint32_t> free = {0, 1, 2};
      for (uint32_t i = 0; i < kRecords; ++i) {
        free.erase(store_.table().place(i).frame);
      }
      if (!free.empty()) store_.Load(record, *free.begin());
      return;
    }
    switch (Below(4)) {
      case 0:
        store_.Sync();
        break;
      case 1:
        if (!place.is_dirty) store_.GiveUp(record);
        break;
      case 2:
        if (place.is_dirty) store_.Write(record);
        break;
      default:
        // One update at a time, as the marks of versions tell two apart.
        if (!place.is_dirty) store_.Update(record);
    }
  }

  std::mt19937_64 random_;
  SmallStore store_;
};

const std::set<storage::PersistPoint> kPoints = {
    storage::PersistPoint::kFrameTableMagic,
    storage::PersistPoint::kRecordPlace,
    storage::PersistPoint::kRecordPlaceStored,
    storage::PersistPoint::kFrameTableSyncing,
    storage::PersistPoint::kFrameTableSyncingStored};

TEST_F(FrameTableTest, AnyStoreMayBeTheLast) {
  for (int round = 0; round < 20; ++round) {
    store_ = SmallStore();
    const std::vector<storage::StoreMoment> moments = WatchOne();
    std::set<storage::PersistPoint> reached;
    for (size_t i = 0; i + 1 < moments.size(); ++i) {
      if (moments[i].point != storage::PersistPoint::kCount) {
        reached.insert(moments[i].point);
      }
      ASSERT_TRUE(storage::AllMixturesRecover(
          moments[i], moments[i + 1], store_.memory().size(), &random_,
          store_.memory(), [this] { return store_.IsSound(); }))
          << "behind moment " << i << ", point "
          << static_cast<int>(moments[i].point);
    }
    EXPECT_EQ(reached, kPoints);
  }
}

// Without any one of the points, some order of stores leaves a table that is
// not sound: so the test above would notice that it is missing.
TEST_F(FrameTableTest, EachPointIsNeeded) {
  std::set<storage::PersistPoint> needed;
  for (int round = 0; round < 20; ++round) {
    store_ = SmallStore();
    needed.merge(storage::NeededPoints(WatchOne(), store_.memory().size(),
                                       &random_, store_.memory(),
                                       [this] { return store_.IsSound(); }));
  }
  // A table without records has no other store before its magic.
  FrameTable::Shape shape = ShapeOf();
  shape.records = 0;
  std::vector<uint64_t> words(FrameTable::BytesNeeded(shape) / 8 + 1);
  const auto memory = absl::MakeSpan(reinterpret_cast<std::byte*>(words.data()),
                                     words.size() * sizeof(uint64_t));
  const std::vector<storage::StoreMoment> moments =
      storage::WatchStores(memory, [&] { FrameTable(memory).Make(shape); });
  // A few orders alone might not show it.
  for (int round = 0; round < 100; ++round) {
    needed.merge(storage::NeededPoints(
        moments, memory.size(), &random_, memory, [&memory, &shape] {
          return !FrameTable::IsMade(memory) ||
                 FrameTable(memory).Check(shape).ok();
        }));
  }
  EXPECT_EQ(needed, kPoints);
}

}  // namespace
}  // namespace optstate::nvme
