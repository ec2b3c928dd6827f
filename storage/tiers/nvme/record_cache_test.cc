#include "storage/tiers/nvme/record_cache.h"

#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "storage/io/io_engine.h"
#include "storage/io/test_seed.h"
#include "storage/state_store.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/read_queue.h"

namespace optstate::nvme {
namespace {

using Access = storage::StateStore::Access;
using List = RecordCache::List;

constexpr uint32_t kRecords = 6;
constexpr uint32_t kFrames = 3;
constexpr uint32_t kNoFrame = RecordCache::kNoFrame;

FrameTable::Shape ShapeOf() {
  FrameTable::Shape shape;
  shape.records = kRecords;
  shape.frames = kFrames;
  shape.slots = 2;
  return shape;
}

// A cache without a store: the test says when reads and writes end.
class RecordCacheTest : public ::testing::Test {
 protected:
  RecordCacheTest()
      : words_(FrameTable::BytesNeeded(ShapeOf()) / sizeof(uint64_t) + 1),
        table_({reinterpret_cast<std::byte*>(words_.data()),
                words_.size() * sizeof(uint64_t)}),
        cache_(kFrames, kRecords, &table_),
        queue_(&cache_) {
    table_.Make(ShapeOf());
    cache_.Adopt();
  }

  // Begins the read of a record; kNoFrame: there is no frame for it.
  uint32_t StartRead(uint32_t record, bool is_demanded = true) {
    const uint32_t frame = cache_.TakeFrame(is_demanded);
    if (frame == kNoFrame) return kNoFrame;
    cache_.Assign(frame, record);
    return frame;
  }
  void EndRead(uint32_t record) {
    cache_.SetLoaded(cache_.record(record).loaded_frame);
    cache_.BeginCheck(record);
    cache_.EndCheck(record);
  }
  void Read(uint32_t record) {
    ASSERT_NE(StartRead(record), kNoFrame);
    EndRead(record);
  }
  void Write(uint32_t record) {
    ASSERT_TRUE(cache_.IsWritable(record));
    const uint32_t frame = cache_.place(record).frame;
    cache_.BeginWrite(frame, 1 - cache_.place(record).slot);
    cache_.EndWrite(frame);
    cache_.SetWritten(frame);
  }
  // Fills the frames with records 0, 1, 2 as they are on disk.
  void Fill() {
    for (uint32_t i = 0; i < kFrames; ++i) {
      Read(i);
      Write(i);
    }
  }

  std::vector<uint64_t> words_;
  FrameTable table_;
  RecordCache cache_;
  ReadQueue queue_;
};

TEST_F(RecordCacheTest, GivesUpTheRecordUsedLongestAgo) {
  Fill();
  cache_.Pin(0, Access::kRead, /*is_of_pass=*/false);
  EXPECT_TRUE(cache_.Unpin(0));
  const uint32_t frame = cache_.place(1).frame;
  EXPECT_EQ(StartRead(3), frame);
  EXPECT_EQ(cache_.place(1).frame, kNoFrame);
  EXPECT_FALSE(cache_.IsInMemory(1));
  EXPECT_TRUE(cache_.IsInMemory(3));
  // The record is in no place before it has been read and checked.
  EXPECT_EQ(cache_.place(3).frame, kNoFrame);
  EndRead(3);
  EXPECT_EQ(cache_.place(3).frame, frame);
}

TEST_F(RecordCacheTest, GivesUpNoFrameNewerThanTheDisk) {
  for (uint32_t i = 0; i < kFrames; ++i) Read(i);  // zeros, not on disk
  EXPECT_EQ(StartRead(3), kNoFrame);
  const uint32_t frame = cache_.place(2).frame;
  cache_.BeginWrite(frame, 0);
  EXPECT_FALSE(cache_.IsWritable(2));
  EXPECT_EQ(StartRead(3), kNoFrame);
  cache_.EndWrite(frame);
  EXPECT_EQ(StartRead(3), kNoFrame);  // the write has failed
  cache_.SetWritten(frame);
  EXPECT_EQ(StartRead(3), frame);
}

TEST_F(RecordCacheTest, GivesUpNoRecordPinnedOrWaitedFor) {
  Fill();
  cache_.Pin(0, Access::kRead, /*is_of_pass=*/false);
  cache_.Pin(0, Access::kRead, /*is_of_pass=*/false);
  cache_.record(1).waiters = 1;
  const uint32_t frame = cache_.place(0).frame;
  cache_.Pin(2, Access::kRead, /*is_of_pass=*/false);
  EXPECT_EQ(StartRead(3), kNoFrame);
  EXPECT_FALSE(cache_.Unpin(0));
  EXPECT_EQ(StartRead(3), kNoFrame);
  EXPECT_TRUE(cache_.Unpin(0));
  EXPECT_EQ(StartRead(3), frame);
  EXPECT_EQ(StartRead(4), kNoFrame);
  cache_.record(1).waiters = 0;
  EXPECT_NE(StartRead(4), kNoFrame);
}

TEST_F(RecordCacheTest, GivesUpRecordsOfThePassLastAndOnDemandOnly) {
  Fill();
  cache_.SetPending(0, true);
  cache_.SetPending(1, true);
  const uint32_t done = cache_.place(2).frame;
  EXPECT_EQ(StartRead(3, /*is_demanded=*/false), done);
  EXPECT_EQ(StartRead(4, /*is_demanded=*/false), kNoFrame);
  EXPECT_NE(StartRead(4, /*is_demanded=*/true), kNoFrame);
  EXPECT_FALSE(cache_.IsInMemory(0));
  EXPECT_TRUE(cache_.IsInMemory(1));
}

TEST_F(RecordCacheTest, GivesUpWhatIsLoadedBeforeWhatIsReady) {
  Fill();
  const uint32_t loaded = StartRead(3);
  const uint32_t ready = cache_.place(1).frame;
  EXPECT_EQ(StartRead(4), ready);
  cache_.SetLoaded(loaded);
  EXPECT_EQ(StartRead(5), loaded);
  EXPECT_FALSE(cache_.IsInMemory(3));
  EXPECT_TRUE(cache_.IsInMemory(2));
}

TEST_F(RecordCacheTest, TakesNoFrameThatIsBeingChecked) {
  Fill();
  cache_.Pin(1, Access::kRead, /*is_of_pass=*/false);
  cache_.Pin(2, Access::kRead, /*is_of_pass=*/false);
  const uint32_t frame = StartRead(3);
  cache_.SetLoaded(frame);
  cache_.BeginCheck(3);
  EXPECT_EQ(StartRead(4), kNoFrame);
  cache_.DropLoaded(frame);  // damaged
  EXPECT_FALSE(cache_.IsInMemory(3));
  EXPECT_EQ(StartRead(4), frame);
}

TEST_F(RecordCacheTest, AWritePinMakesTheRecordDirtyAndKeepsItFromWrites) {
  Fill();
  const uint32_t frame = cache_.place(0).frame;
  cache_.frame(frame).has_sums = true;
  cache_.Pin(0, Access::kRead, /*is_of_pass=*/true);
  EXPECT_FALSE(cache_.place(0).is_dirty);
  EXPECT_TRUE(cache_.frame(frame).has_sums);
  EXPECT_FALSE(cache_.record(0).is_of_pass);
  cache_.Pin(0, Access::kWrite, /*is_of_pass=*/true);
  EXPECT_TRUE(cache_.place(0).is_dirty);
  EXPECT_FALSE(cache_.frame(frame).has_sums);
  EXPECT_TRUE(cache_.record(0).is_of_pass);
  cache_.Unpin(0);
  EXPECT_FALSE(cache_.IsWritable(0));
  cache_.Unpin(0);
  EXPECT_TRUE(cache_.IsWritable(0));
}

TEST_F(RecordCacheTest, AFrameThatIsWrittenOrSummedIsReadOnly) {
  Fill();
  RecordCache::Frame& frame = cache_.frame(cache_.place(0).frame);
  EXPECT_TRUE(cache_.MayPin(0, Access::kWrite));
  frame.is_summing = true;
  EXPECT_FALSE(cache_.MayPin(0, Access::kWrite));
  frame.is_summing = false;
  frame.is_writing = true;
  EXPECT_FALSE(cache_.MayPin(0, Access::kWrite));
  EXPECT_TRUE(cache_.MayPin(0, Access::kRead));
  frame.is_writing = false;
  cache_.SetMustFlush(0, true);
  EXPECT_FALSE(cache_.MayPin(0, Access::kWrite));
  EXPECT_TRUE(cache_.MayPin(0, Access::kRead));
}

TEST_F(RecordCacheTest, AdoptsWhatIsInFrames) {
  Fill();
  EXPECT_NE(StartRead(4), kNoFrame);  // record 0 has lost its frame
  RecordCache next(kFrames, kRecords, &table_);
  next.Adopt();
  EXPECT_FALSE(next.IsInMemory(0));
  EXPECT_FALSE(next.IsInMemory(4));
  for (const uint32_t record : {1U, 2U}) {
    const uint32_t frame = next.place(record).frame;
    EXPECT_EQ(frame, cache_.place(record).frame);
    EXPECT_EQ(next.frame(frame).record, record);
    EXPECT_TRUE(next.frames(List::kClean).Has(frame));
  }
  // The frame that is free goes first.
  EXPECT_EQ(next.frame(next.TakeFrame(/*is_demanded=*/true)).state,
            RecordCache::FrameState::kFree);
  EXPECT_TRUE(next.IsInMemory(1));
  EXPECT_TRUE(next.IsInMemory(2));
}

TEST_F(RecordCacheTest, KnowsTheRequestsOfFrames) {
  for (uint32_t i = 0; i < kFrames; ++i) {
    EXPECT_EQ(cache_.FrameOf(&cache_.frame(i).request), i);
  }
  const io::IoRequest other;
  EXPECT_EQ(cache_.FrameOf(&other), kNoFrame);
}

TEST_F(RecordCacheTest, APassBeginsWithWhatIsInMemory) {
  Read(4);
  Write(4);
  StartRead(2);
  cache_.record(5).error = absl::DataLossError("of an earlier pass");
  const std::vector<uint8_t> wanted = {1, 0, 1, 0, 1, 1};
  ASSERT_EQ(queue_.BeginPass(wanted), 4U);
  const std::vector<uint32_t> order = {2, 4, 0, 5};
  for (size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(queue_.record_of_pass(i), order[i]);
    EXPECT_TRUE(cache_.record(order[i]).is_pending);
  }
  EXPECT_FALSE(cache_.record(1).is_pending);
  EXPECT_TRUE(cache_.record(5).error.ok());
  EXPECT_EQ(queue_.CountWanted(8), 4U);
  EXPECT_EQ(queue_.CountWanted(2), 2U);
  EXPECT_EQ(queue_.NextAhead(), 0U);
  EXPECT_EQ(queue_.CountWanted(8), 2U);
  EXPECT_EQ(queue_.NextAhead(), 0U);  // until it is being read
  EXPECT_NE(StartRead(0), kNoFrame);
  EXPECT_EQ(queue_.NextAhead(), 5U);
  EXPECT_TRUE(queue_.NeedsFrames());
  cache_.SetPending(5, false);
  EXPECT_EQ(queue_.NextAhead(), ReadQueue::kNone);
  EXPECT_FALSE(queue_.NeedsFrames());
}

TEST_F(RecordCacheTest, ARecordIsDemandedOnce) {
  EXPECT_TRUE(queue_.Demand(3));
  EXPECT_FALSE(queue_.Demand(3));
  EXPECT_TRUE(queue_.Demand(1));
  EXPECT_EQ(queue_.demanded(), 2U);
  EXPECT_TRUE(queue_.NeedsFrames());
  EXPECT_EQ(queue_.first_demanded(), 3U);
  queue_.PopDemanded();
  EXPECT_EQ(queue_.first_demanded(), 1U);
  EXPECT_TRUE(queue_.Demand(3));
}

TEST_F(RecordCacheTest, KnowsWhetherEachPassIsCommitted) {
  const std::vector<uint8_t> wanted(kRecords, 1);
  for (const int passes : {1, 2, 1}) {
    for (int i = 0; i < passes; ++i) queue_.BeginPass(wanted);
    queue_.OnCommitRequested();
    EXPECT_EQ(queue_.IsEachPassCommitted(), passes == 1);
  }
}

// With a search through the frames of the pass this would take minutes.
TEST_F(RecordCacheTest, ManyFramesOfThePassAreNotSearched) {
  constexpr uint32_t kMany = 1 << 18;
  FrameTable::Shape shape = ShapeOf();
  shape.records = shape.frames = kMany;
  std::vector<uint64_t> words(
      FrameTable::BytesNeeded(shape) / sizeof(uint64_t) + 1);
  FrameTable table({reinterpret_cast<std::byte*>(words.data()),
                    words.size() * sizeof(uint64_t)});
  table.Make(shape);
  for (uint32_t i = 0; i < kMany; ++i) {
    table.SetPlace(i, {.frame = i, .slot = 0, .is_on_disk = true});
  }
  RecordCache cache(kMany, kMany, &table);
  cache.Adopt();
  for (uint32_t i = 0; i < kMany; ++i) cache.SetPending(i, true);
  for (uint32_t i = 0; i < kMany; ++i) {
    ASSERT_EQ(cache.TakeFrame(/*is_demanded=*/false), kNoFrame);
  }
  EXPECT_EQ(cache.TakeFrame(/*is_demanded=*/true), 0u);
}

// A random program against the promises of the header: every frame is found
// again, and none is given up whose bytes would be lost.
TEST_F(RecordCacheTest, RandomUsesLoseNoFrame) {
  std::mt19937 random(io::TestSeed());
  std::vector<uint32_t> versions(kRecords, 0), on_disk(kRecords, 0);
  std::vector<uint32_t> in_frame(kFrames, 0);
  std::set<uint32_t> writing;  // records
  for (int i = 0; i < 50'000; ++i) {
    const uint32_t record = random() % kRecords;
    RecordCache::Record& state = cache_.record(record);
    const uint32_t frame = cache_.place(record).frame;
    const bool is_ready = frame != kNoFrame;
    switch (random() % 7) {
      case 6:
        cache_.SetPending(record, random() % 2 == 0);
        break;
      case 0:
        if (!cache_.IsInMemory(record)) StartRead(record, random() % 2 == 0);
        break;
      case 1: {
        const uint32_t loaded = state.loaded_frame;
        if (loaded == kNoFrame) break;
        const bool is_good = random() % 4 != 0;
        if (cache_.frame(loaded).state == RecordCache::FrameState::kReading) {
          in_frame[loaded] = on_disk[record];
          is_good ? cache_.SetLoaded(loaded) : cache_.DropLoaded(loaded);
        } else {
          cache_.BeginCheck(record);
          is_good ? cache_.EndCheck(record) : cache_.DropLoaded(loaded);
        }
        break;
      }
      case 2: {
        const Access access =
            random() % 2 == 0 ? Access::kRead : Access::kWrite;
        if (!is_ready || state.pins > 0 || !cache_.MayPin(record, access))
          break;
        EXPECT_EQ(in_frame[frame], versions[record]);
        cache_.Pin(record, access, /*is_of_pass=*/false);
        if (access == Access::kWrite) in_frame[frame] = ++versions[record];
        break;
      }
      case 3:
        if (state.pins > 0) cache_.Unpin(record);
        break;
      case 4:
        if (!cache_.IsWritable(record)) break;
        cache_.BeginWrite(frame, 1 - cache_.place(record).slot);
        writing.insert(record);
        break;
      default:
        if (writing.erase(record) == 0) break;
        ASSERT_TRUE(is_ready);
        cache_.EndWrite(frame);
        on_disk[record] = in_frame[frame];
        cache_.SetWritten(frame);
        break;
    }
    EXPECT_EQ(cache_.writing(), writing.size());
    std::set<uint32_t> used;
    for (uint32_t r = 0; r < kRecords; ++r) {
      const uint32_t ready = cache_.place(r).frame;
      const uint32_t loaded = cache_.record(r).loaded_frame;
      ASSERT_TRUE(ready == kNoFrame || loaded == kNoFrame);
      if (ready == kNoFrame && loaded == kNoFrame) {
        ASSERT_EQ(on_disk[r], versions[r]) << "record " << r << " is lost";
        continue;
      }
      ASSERT_TRUE(used.insert(ready != kNoFrame ? ready : loaded).second);
      if (ready == kNoFrame) continue;
      const bool is_writing = writing.count(r) > 0;
      ASSERT_EQ(cache_.frame(ready).list == List::kNone,
                cache_.record(r).pins > 0 || is_writing);
      const bool is_dirty = cache_.place(r).is_dirty;
      const bool is_pending = cache_.record(r).is_pending;
      EXPECT_EQ(cache_.frames(List::kClean).Has(ready) ||
                    cache_.frames(List::kCleanPending).Has(ready),
                cache_.record(r).pins == 0 && !is_writing && !is_dirty);
      EXPECT_EQ(cache_.frames(List::kDirtyPending).Has(ready) ||
                    cache_.frames(List::kCleanPending).Has(ready),
                cache_.record(r).pins == 0 && !is_writing && is_pending);
    }
  }
  // All frames can be had in the end.
  for (uint32_t i = 0; i < kRecords; ++i) {
    const uint32_t loaded = cache_.record(i).loaded_frame;
    if (loaded != kNoFrame) {
      if (cache_.frame(loaded).state == RecordCache::FrameState::kReading) {
        cache_.SetLoaded(loaded);
      }
      cache_.BeginCheck(i);
      cache_.EndCheck(i);
    }
    if (cache_.record(i).pins > 0) cache_.Unpin(i);
    if (writing.erase(i) > 0) cache_.EndWrite(cache_.place(i).frame);
    if (cache_.IsWritable(i)) Write(i);
  }
  std::set<uint32_t> frames;
  for (uint32_t i = 0; i < kFrames; ++i) {
    frames.insert(cache_.TakeFrame(/*is_demanded=*/true));
  }
  EXPECT_EQ(frames, (std::set<uint32_t>{0, 1, 2}));
}

}  // namespace
}  // namespace optstate::nvme
