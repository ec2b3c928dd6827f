#include "storage/tiers/host_store.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "proto/types/array_format.h"
#include "proto/types/random_layout.h"
#include "proto/types/runs.h"
#include "storage/record_rewrite.h"

namespace optstate::storage {
namespace {

uint64_t NumelOf(const Layout& layout, uint32_t parameter) {
  return static_cast<uint64_t>(layout.parameters()[parameter].numel);
}

// Memory for every array of a layout.
struct Memory {
  explicit Memory(const Layout& layout)
      : parameters(layout.parameter_area_bytes()),
        master(layout.flat_elements() * sizeof(float)),
        accumulator(layout.flat_elements()) {
    arrays.parameters = parameters.data();
    arrays.master = master.data();
    arrays.accumulator = accumulator.data();
    for (size_t k = 0; k < kStateArraysMax; ++k) {
      state[k].resize(layout.flat_elements() * sizeof(float));
      scale[k].resize(layout.flat_elements());
      arrays.state[k] = state[k].data();
      if (ArrayFormat(layout, static_cast<int>(k)) == StateFormat::kDynamic8) {
        arrays.scale[k] = scale[k].data();
      }
    }
  }

  std::vector<std::byte> parameters, master;
  std::vector<float> accumulator;
  std::array<std::vector<std::byte>, kStateArraysMax> state;
  std::array<std::vector<float>, kStateArraysMax> scale;
  StateArrays arrays;
};

// Elements are where the layout says, whatever record they are seen through.
TEST(HostStoreTest, ElementsAreInTheirPlaces) {
  RandomLayouts layouts;
  for (int round = 0; round < 50; ++round) {
    const Layout layout = *Layout::Make(layouts.Next(20));
    const Memory memory(layout);
    HostStore store(&layout, layouts.Uniform(1, 4 * kTileElements),
                    memory.arrays);
    for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
      const ParameterSpec& spec = layout.parameters()[p];
      const absl::Status visited = store.ForEachRecord(
          p, 0, NumelOf(layout, p), StateStore::Access::kRead,
          [&](const RecordView& record, uint64_t begin, uint64_t numel) {
            ASSERT_GT(numel, 0u);
            const uint64_t flat = layout.flat_offset(p) + begin;
            EXPECT_LE(record.sub_group().begin, flat);
            EXPECT_GE(record.sub_group().end, flat + numel);
            EXPECT_EQ(record.parameter(p, begin),
                      memory.parameters.data() +
                          layout.parameter_offset_bytes(p) +
                          begin * SizeInBytes(spec.dtype));
            EXPECT_EQ(store.sums(p, begin), reinterpret_cast<const std::byte*>(
                                                &memory.accumulator[flat]));
            const MasterFormat master = layout.master_format(p);
            EXPECT_EQ(record.master(p, begin),
                      master == MasterFormat::kParameter
                          ? record.parameter(p, begin)
                          : memory.master.data() + flat * SizeInBytes(master));
            for (int k = 0; k < kStateArraysMax; ++k) {
              const auto index = static_cast<size_t>(k);
              if (!layout.has_state_array(k, spec.group)) {
                EXPECT_EQ(record.state(k, p, begin), nullptr);
                EXPECT_EQ(record.scale(k, p, begin), nullptr);
                continue;
              }
              EXPECT_EQ(record.state(k, p, begin),
                        memory.state[index].data() +
                            flat * SizeInBytes(ArrayFormat(layout, k)));
              if (memory.arrays.scale[index] == nullptr) continue;
              EXPECT_EQ(record.scale(k, p, begin),
                        &memory.scale[index][flat / kQuantizedBlockElements]);
            }
          });
      EXPECT_TRUE(visited.ok());
    }
  }
}

// The parts of the runs of all parameters do not overlap, and are within the
// record's own.
TEST(HostStoreTest, PartsAreWithinTheRecord) {
  RandomLayouts layouts;
  for (int round = 0; round < 20; ++round) {
    const Layout layout = *Layout::Make(layouts.Next(20));
    const Memory memory(layout);
    HostStore store(&layout, 2 * kTileElements, memory.arrays);
    std::array<const std::byte*, kRecordPartCount> last = {};
    for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
      ForEachRun(
          layout, p, 0, NumelOf(layout, p),
          [&](uint64_t /*run*/, uint64_t begin, uint64_t numel) {
            const RecordView record =
                store.record(store.sub_groups().IndexOf(p, begin));
            record.ForEachStatePart(
                p, begin, numel, [&](int part, absl::Span<std::byte> bytes) {
                  const absl::Span<std::byte> whole = record.part(part);
                  EXPECT_GE(bytes.data(), whole.data());
                  EXPECT_LE(bytes.data() + bytes.size(),
                            whole.data() + whole.size());
                  const std::byte*& end = last[static_cast<size_t>(part)];
                  EXPECT_GE(bytes.data(), end);
                  end = bytes.data() + bytes.size();
                });
          });
    }
  }
}

// The calls that need a disk are refused, whoever makes them.
TEST(HostStoreTest, RecordsInMemoryAreNotWrittenAnew) {
  RandomLayouts layouts;
  const Layout layout = *Layout::Make(layouts.Next(20));
  const Memory memory(layout);
  HostStore store(&layout, 2 * kTileElements, memory.arrays);
  RewriteTarget target;
  target.layout = &layout;
  bool is_called = false;
  const auto commit = [&is_called] {
    is_called = true;
    return absl::OkStatus();
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(store.BeginMove(target)));
  EXPECT_TRUE(absl::IsFailedPrecondition(store.CopyRecords()));
  EXPECT_TRUE(absl::IsFailedPrecondition(store.FinishMove(commit).status()));
  EXPECT_FALSE(is_called);
  store.CancelMove(absl::AbortedError("there is none"));
  store.EndMove();
  EXPECT_TRUE(absl::IsFailedPrecondition(store.WriteAnew(target).status()));
  EXPECT_FALSE(store.rewriting().has_value());
  store.RemoveAnew(target.arrangement);
}

}  // namespace
}  // namespace optstate::storage
