// Tests the frame table of a store in use at each point where the order of
// stores counts.

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/persist_in_order.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"
#include "storage/tiers/nvme/record_layout.h"

namespace optstate::nvme {
namespace {

constexpr size_t kRecordCount = 12;

// The job that the hook looks at. The store calls the hook with its lock held.
NvmeTestJob* watched = nullptr;
const RecordLayout* watched_layout = nullptr;
std::atomic<uint64_t>
    points[static_cast<size_t>(storage::PersistPoint::kCount)];
std::atomic<uint64_t> frames_compared, frames_differ;

// A frame that a place names, and that was not changed since, has what the
// slot has.
void LookAtPlaces(storage::PersistPoint point) {
  ++points[static_cast<size_t>(point)];
  if (point != storage::PersistPoint::kRecordPlaceStored) return;
  const FrameTable table(watched->table().span());
  for (uint32_t i = 0; i < kRecordCount; ++i) {
    const RecordPlace place = table.place(i);
    if (place.frame == RecordPlace::kNoFrame || place.is_dirty) continue;
    const std::byte* const frame =
        watched->frames().span().data() + place.frame * watched->sizes().frame;
    ++frames_compared;
    if (watched_layout->FirstDifference(i, frame, /*with_parameters=*/false,
                                        table.checksums(place.slot)) >= 0) {
      ++frames_differ;
    }
  }
}

TEST(NvmePlacesTest, AFrameThatIsNamedIsWholeAtEachPoint) {
  RandomLayouts layouts;
  io::SimulatedDisk disk({.seed = layouts.Uniform(0, UINT32_MAX),
                          .latency_us_max = 500,
                          .folders = {"/disk"}});
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {{.name = "a",
                      .shape = {kRecordCount * kTileElements},
                      .numel = kRecordCount * kTileElements}};
  NvmeTestJob::Setup setup;
  setup.layout = *Layout::Make(std::move(spec));
  setup.sub_group_elements = kTileElements;
  setup.make_engine = [&disk] { return io::MakeSimulatedIoEngine(&disk); };
  NvmeTestJob job(std::move(setup));
  const SubGroupTable sub_groups(&job.layout(), kTileElements,
                                 SubGroupTable::CutOf(job.layout()));
  const RecordLayout record_layout(&job.layout(), &sub_groups,
                                   RecordSection::kMasters);
  watched = &job;
  watched_layout = &record_layout;
  // The table says that a sync is under way before it is.
  std::atomic<uint64_t> syncs = 0;
  disk.SetHook([&](const io::SimulatedEvent& event) {
    if (event.kind != io::SimulatedEvent::Kind::kSyncBegun ||
        event.path != "/disk/records") {
      return;
    }
    ++syncs;
    EXPECT_TRUE(FrameTable(job.table().span()).is_syncing());
  });
  storage::persist_hook.store(&LookAtPlaces);
  ASSERT_EQ(job.Open(), absl::OkStatus());
  const std::vector<uint8_t> all(kRecordCount, 1);
  for (uint64_t step = 1; step <= 10; ++step) {
    const auto positions = job.store().BeginPass(all);
    ASSERT_TRUE(positions.ok()) << positions.status();
    std::atomic<size_t> next = 0;
    const auto update = [&](uint64_t seed) {
      std::mt19937_64 random(seed);
      for (size_t i = next++; i < *positions; i = next++) {
        const auto pin = job.store().PinOfPass(i);
        ASSERT_TRUE(pin.ok()) << pin.status();
        job.WriteTo(*pin, &random);
      }
    };
    std::thread other(update, layouts.Uniform(0, UINT32_MAX));
    update(layouts.Uniform(0, UINT32_MAX));
    other.join();
    ASSERT_EQ(job.RequestCommit(step), absl::OkStatus());
  }
  ASSERT_EQ(job.store().AwaitCommit(), absl::OkStatus());
  EXPECT_EQ(job.CompareAll(), absl::OkStatus());
  job.Close();
  storage::persist_hook.store(nullptr);
  EXPECT_EQ(frames_differ, 0u);
  EXPECT_GT(frames_compared, 100u);
  EXPECT_EQ(syncs, 10u);
  for (const storage::PersistPoint point :
       {storage::PersistPoint::kFrameTableMagic,
        storage::PersistPoint::kRecordPlace,
        storage::PersistPoint::kRecordPlaceStored,
        storage::PersistPoint::kFrameTableSyncing,
        storage::PersistPoint::kFrameTableSyncingStored}) {
    EXPECT_GT(points[static_cast<size_t>(point)], 0u)
        << static_cast<int>(point);
  }
}

}  // namespace
}  // namespace optstate::nvme
