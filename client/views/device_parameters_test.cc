#include "client/views/device_parameters.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/device_parameters.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr uint32_t kDevice = 3;
constexpr uint64_t kMemoryBytes = uint64_t{4} << 20;
constexpr uint64_t kTiles = 100;
constexpr uint64_t kTileBytes = 2 * kTileElements;
// The fewest tiles that are worth a copy.
constexpr uint64_t kTilesMin = DeviceParameters::kRangeBytesMin / kTileBytes;

ParameterSpec BFloat16(const std::string& name, uint64_t numel) {
  return {.name = name,
          .shape = {static_cast<int64_t>(numel)},
          .numel = static_cast<int64_t>(numel),
          .dtype = DType::kBFloat16,
          .gradient_dtype = DType::kBFloat16,
          .group = 0};
}

// A parameter of whole tiles, and one that is small.
Layout MakeLayout() {
  return *Layout::Make({.optimizer = OptimizerKind::kAdamW,
                        .groups = {{.options = 0}},
                        .parameters = {BFloat16("a", kTiles * kTileElements),
                                       BFloat16("b", 10)}});
}

class DeviceParametersTest : public testing::Test {
 protected:
  DeviceParametersTest()
      : layout_(MakeLayout()),
        table_(*shm::SealedSegment::Create(
            "table", shm::DeviceParametersBytes(layout_.run_count()))),
        stamps_(layout_.run_count()) {
    header()->magic = shm::kDeviceParametersMagic;
    header()->version = shm::kDeviceParametersVersion;
    header()->segment_bytes = table_.size();
    header()->run_count = layout_.run_count();
  }

  shm::DeviceParametersHeader* header() const {
    return reinterpret_cast<shm::DeviceParametersHeader*>(table_.data());
  }
  shm::DeviceParameterRun* entry(uint64_t run) const {
    return reinterpret_cast<shm::DeviceParameterRun*>(header() + 1) + run;
  }
  void Put(uint64_t run, uint64_t offset, uint64_t step = 5,
           uint32_t device = kDevice) {
    entry(run)->place = shm::DeviceParameterPlace(device, offset);
    entry(run)->step = step;
    stamps_[run] = step;
  }
  DeviceParameters::Shared Shared() const {
    DeviceParameters::Shared shared;
    shared.table = UniqueFd(fcntl(table_.fd(), F_DUPFD_CLOEXEC, 0));
    shared.memory = UniqueFd(memfd_create("memory", MFD_CLOEXEC));
    shared.device_index = kDevice;
    shared.memory_bytes = kMemoryBytes;
    return shared;
  }
  std::unique_ptr<DeviceParameters> Map() const {
    auto mapped = DeviceParameters::Map(Shared(), layout_, /*connection=*/7);
    EXPECT_TRUE(mapped.ok()) << mapped.status();
    return *std::move(mapped);
  }
  std::vector<DeviceParameters::Range> Find(uint32_t parameter) {
    std::vector<DeviceParameters::Range> ranges;
    const absl::Status found =
        Map()->FindRanges(parameter, stamps_.data(), &ranges);
    EXPECT_TRUE(found.ok()) << found;
    return ranges;
  }

  const Layout layout_;
  const shm::SealedSegment table_;
  std::vector<std::atomic<uint64_t>> stamps_;
};

TEST_F(DeviceParametersTest, NeighboursAreOneRange) {
  EXPECT_THAT(Find(0), IsEmpty());
  for (uint64_t run = 0; run < kTiles; ++run) Put(run, 64 + run * kTileBytes);
  const auto ranges = Find(0);
  ASSERT_THAT(ranges, SizeIs(1));
  EXPECT_EQ(ranges[0].begin, 0u);
  EXPECT_EQ(ranges[0].end, kTiles * kTileElements);
  EXPECT_EQ(ranges[0].offset_bytes, 64u);
  const auto parameters = Map();
  EXPECT_EQ(parameters->memory_bytes(), kMemoryBytes);
  EXPECT_EQ(parameters->connection(), 7u);
  EXPECT_GE(parameters->memory_file(), 0);
}

TEST_F(DeviceParametersTest, ShortRangesAreLeftOut) {
  static_assert(kTilesMin > 2 && kTiles > 2 * kTilesMin + 2);
  // A gap in place, and a gap of a run that is not there, make ranges.
  for (uint64_t run = 0; run < kTiles; ++run) Put(run, run * kTileBytes);
  for (uint64_t run = kTilesMin; run < kTiles; ++run) {
    Put(run, (run + 1) * kTileBytes);
  }
  entry(2 * kTilesMin)->step = 0;
  auto ranges = Find(0);
  ASSERT_GE(ranges.size(), 2u);
  EXPECT_EQ(ranges[0].begin, 0u);
  EXPECT_EQ(ranges[0].end, kTilesMin * kTileElements);
  EXPECT_EQ(ranges[1].begin, kTilesMin * kTileElements);
  EXPECT_EQ(ranges[1].end, 2 * kTilesMin * kTileElements);
  EXPECT_EQ(ranges[1].offset_bytes, (kTilesMin + 1) * kTileBytes);
  entry(1)->step = 0;
  ranges = Find(0);
  ASSERT_GE(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].begin, kTilesMin * kTileElements)
      << "what is left of the first is too short";
  // A whole parameter may be short.
  const uint64_t last = layout_.run_count() - 1;
  Put(last, 128);
  ranges = Find(1);
  ASSERT_THAT(ranges, SizeIs(1));
  EXPECT_EQ(ranges[0].end, 10u);
  EXPECT_EQ(ranges[0].offset_bytes, 128u);
}

TEST_F(DeviceParametersTest, WholeParametersAreFoundTogether) {
  const std::vector<uint32_t> both = {1, 0};
  std::vector<uint64_t> offsets(2);
  for (uint64_t run = 0; run < kTiles; ++run) Put(run, 64 + run * kTileBytes);
  ASSERT_TRUE(
      Map()->FindWhole(both, stamps_.data(), absl::MakeSpan(offsets)).ok());
  EXPECT_EQ(offsets[0], DeviceParameters::kNowhere);
  EXPECT_EQ(offsets[1], 64u);
  Put(layout_.run_count() - 1, 32);
  entry(kTiles / 2)->step = 0;  // in two parts
  ASSERT_TRUE(
      Map()->FindWhole(both, stamps_.data(), absl::MakeSpan(offsets)).ok());
  EXPECT_EQ(offsets[0], 32u);
  EXPECT_EQ(offsets[1], DeviceParameters::kNowhere);
}

TEST_F(DeviceParametersTest, OnlyWhatIsCurrentCounts) {
  const uint64_t run = layout_.run_count() - 1;
  Put(run, 0);
  EXPECT_THAT(Find(1), SizeIs(1));
  stamps_[run] = 6;  // the area has a later step
  EXPECT_THAT(Find(1), IsEmpty());
  std::vector<DeviceParameters::Range> ranges;
  EXPECT_TRUE(Map()->FindRanges(1, nullptr, &ranges).ok());
  EXPECT_THAT(ranges, SizeIs(1)) << "without stamps the table says it";
  Put(run, 0, 5, kDevice + 1);
  EXPECT_THAT(Find(1), IsEmpty()) << "on another device";
  Put(run, 0);
  header()->is_over = 1;
  EXPECT_TRUE(Map()->is_over());
  EXPECT_THAT(Find(1), IsEmpty());
}

TEST_F(DeviceParametersTest, APlaceOutsideOfTheMemoryIsAnError) {
  const uint64_t run = layout_.run_count() - 1;
  for (const uint64_t offset :
       {kMemoryBytes - 19, kMemoryBytes, (uint64_t{1} << 48) - 1}) {
    Put(run, offset);
    std::vector<DeviceParameters::Range> ranges;
    const absl::Status found = Map()->FindRanges(1, stamps_.data(), &ranges);
    EXPECT_TRUE(absl::IsInternal(found)) << found;
    EXPECT_THAT(ranges, IsEmpty());
  }
  Put(run, kMemoryBytes - 20);
  EXPECT_THAT(Find(1), SizeIs(1));
}

TEST_F(DeviceParametersTest, AnotherTableIsRefused) {
  const auto refusal = [this] {
    return DeviceParameters::Map(Shared(), layout_, 1).status();
  };
  header()->magic = 1;
  EXPECT_THAT(refusal().message(), HasSubstr("magic"));
  header()->magic = shm::kDeviceParametersMagic;
  header()->version = 9;
  EXPECT_TRUE(absl::IsFailedPrecondition(refusal())) << refusal();
  EXPECT_THAT(refusal().message(), HasSubstr("version 9"));
  header()->version = shm::kDeviceParametersVersion;
  header()->run_count = 2;
  EXPECT_THAT(refusal().message(), HasSubstr("2 runs"));
  header()->run_count = layout_.run_count();
  EXPECT_TRUE(refusal().ok()) << refusal();
  DeviceParameters::Shared unsealed = Shared();
  unsealed.table = UniqueFd(memfd_create("unsealed", MFD_CLOEXEC));
  EXPECT_TRUE(absl::IsInvalidArgument(
      DeviceParameters::Map(std::move(unsealed), layout_, 1).status()));
}

}  // namespace
}  // namespace optstate::client
