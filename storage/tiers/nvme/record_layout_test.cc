#include "storage/tiers/nvme/record_layout.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/layout.h"
#include "proto/types/sub_groups.h"
#include "storage/io/io_engine.h"

namespace optstate::nvme {
namespace {

constexpr uint64_t kSector = io::kSectorBytes;

// AdamW: a float parameter over the first record's end, and one of 16 bits.
Layout MixedLayout() {
  LayoutSpec spec;
  spec.groups.resize(1);
  const auto add = [&](const char* name, int64_t numel, DType dtype) {
    ParameterSpec parameter;
    parameter.name = name;
    parameter.numel = numel;
    parameter.shape = {numel};
    parameter.dtype = dtype;
    spec.parameters.push_back(std::move(parameter));
  };
  add("a", 5000, DType::kFloat32);
  add("b", 100, DType::kBFloat16);
  return *Layout::Make(std::move(spec));
}

class RecordLayoutTest : public testing::Test {
 protected:
  const Layout layout_ = MixedLayout();
  const SubGroupTable sub_groups_{&layout_, kTileElements,
                                  SubGroupTable::Cut::kTiles};
  const RecordLayout without_{&layout_, &sub_groups_, RecordSection::kNone};
  const RecordLayout beside_{&layout_, &sub_groups_, RecordSection::kMasters};
  const RecordLayout within_{&layout_, &sub_groups_, RecordSection::kAll};
};

TEST_F(RecordLayoutTest, TheSectionHasAllParametersWhereThereIsNoArea) {
  ASSERT_EQ(sub_groups_.size(), 2u);
  // The first record has a float parameter alone, which is its own master.
  EXPECT_EQ(beside_.section_bytes(0), kTileElements * 4);
  EXPECT_EQ(within_.section_bytes(0), kTileElements * 4);
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(within_.section_begin(i), within_.state_bytes(i));
    EXPECT_EQ(within_.section_begin(i) % kSector, 0u);
    EXPECT_EQ(within_.bytes(i),
              within_.state_bytes(i) + within_.section_bytes(i));
    EXPECT_EQ(within_.state_bytes(i), beside_.state_bytes(i));
  }
  EXPECT_EQ(within_.section_bytes_max(), kTileElements * 4);
  EXPECT_EQ(within_.checksum_count(), beside_.checksum_count());
}

TEST_F(RecordLayoutTest, ARecordMayLackItsSection) {
  EXPECT_EQ(without_.section(), RecordSection::kNone);
  EXPECT_EQ(without_.section_bytes_max(), 0u);
  EXPECT_EQ(without_.checksum_count(), beside_.checksum_count());
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(without_.bytes(i), beside_.state_bytes(i));
    EXPECT_EQ(without_.state_bytes(i), beside_.state_bytes(i));
  }
  // The masters of one parameter give each record room for masters.
  EXPECT_EQ(without_.frame_bytes(), kTileElements * 12);
  EXPECT_EQ(beside_.frame_bytes(), kTileElements * 16);
  // Parameters are where they are with a section.
  std::vector<std::byte> area(layout_.parameter_area_bytes());
  std::vector<std::byte> frame(without_.frame_bytes());
  const storage::RecordView view =
      without_.ViewOf(0, frame.data(), area.data());
  EXPECT_EQ(view.parameter(0, 0), area.data());
}

// Without a parameter that is a part of its master there is nothing to leave
// out, and the records are those of former builds.
TEST_F(RecordLayoutTest, OnlyWhatThereIsIsLeftOut) {
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {
      {.name = "a", .shape = {5000}, .numel = 5000, .dtype = DType::kBFloat16}};
  const Layout layout = *Layout::Make(std::move(spec));
  const SubGroupTable sub_groups(&layout, kTileElements,
                                 SubGroupTable::Cut::kTiles);
  const RecordLayout records(&layout, &sub_groups, RecordSection::kNone);
  EXPECT_EQ(records.section(), RecordSection::kMasters);
  EXPECT_EQ(records.section_bytes_max(), 0u);
}

// Each part begins at its distance times the widest size, here 4 bytes.
TEST_F(RecordLayoutTest, ParametersLieInTheFrame) {
  std::vector<std::byte> frame(within_.frame_bytes());
  const storage::RecordView first = within_.ViewOf(0, frame.data(), nullptr);
  std::byte* const section = frame.data() + within_.section_begin(0);
  EXPECT_EQ(first.parameter(0, 0), section);
  EXPECT_EQ(first.parameter(0, 17), section + 17 * 4);
  EXPECT_EQ(first.master(0, 17), section + 17 * 4);

  const storage::RecordView second = within_.ViewOf(1, frame.data(), nullptr);
  std::byte* const next = frame.data() + within_.section_begin(1);
  EXPECT_EQ(second.parameter(0, kTileElements), next);
  EXPECT_EQ(second.parameter(0, 4999), next + (4999 - kTileElements) * 4);
  const uint64_t distance = layout_.flat_offset(1) - kTileElements;
  EXPECT_EQ(second.parameter(1, 0), next + distance * 4);
  EXPECT_EQ(second.parameter(1, 99), next + distance * 4 + 99 * 2);
  // Its masters are beside it.
  EXPECT_NE(second.master(1, 0), second.parameter(1, 0));
}

TEST_F(RecordLayoutTest, ASectionAloneIsSeenAsTheRecordIs) {
  std::vector<std::byte> section(within_.section_bytes_max());
  const storage::RecordView view = within_.SectionView(1, section.data());
  EXPECT_EQ(view.parameter(0, kTileElements), section.data());
  const uint64_t distance = layout_.flat_offset(1) - kTileElements;
  EXPECT_EQ(view.parameter(1, 3), section.data() + distance * 4 + 3 * 2);
  EXPECT_TRUE(view.part(storage::kStatePart0).empty());
}

// The checksum of a section is the record's, and covers each byte of each
// parameter and none between them.
TEST_F(RecordLayoutTest, ASectionHasItsOwnChecksum) {
  std::vector<std::byte> frame(within_.bytes(1), std::byte{7});
  std::vector<uint32_t> sums(within_.record_checksums_max());
  std::vector<uint32_t> all(within_.checksum_count());
  within_.Sum(1, frame.data(), /*with_parameters=*/true, absl::MakeSpan(sums));
  within_.PutSums(1, sums, /*with_parameters=*/true, absl::MakeSpan(all));
  std::byte* const section = frame.data() + within_.section_begin(1);
  EXPECT_EQ(within_.SectionSum(1, section), within_.section_sum(1, all));
  const storage::RecordView view = within_.ViewOf(1, frame.data(), nullptr);
  uint64_t covered = 0;
  for (uint64_t i = 0; i < within_.section_bytes(1); ++i) {
    section[i] ^= std::byte{1};
    covered += within_.SectionSum(1, section) != within_.section_sum(1, all);
    section[i] ^= std::byte{1};
  }
  EXPECT_EQ(covered, (5000 - kTileElements) * 4 + 100 * 2);
  *view.parameter(1, 99) ^= std::byte{1};
  EXPECT_GE(
      within_.FirstDifference(1, frame.data(), /*with_parameters=*/true, all),
      0);
  EXPECT_EQ(
      within_.FirstDifference(1, frame.data(), /*with_parameters=*/false, all),
      -1);
}

}  // namespace
}  // namespace optstate::nvme
