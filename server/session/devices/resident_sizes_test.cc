#include "server/session/devices/resident_sizes.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/executors/device_update_executor.h"

namespace optstate::session {
namespace {

using scheduler::GradientLog;
using ::testing::HasSubstr;

constexpr uint64_t kTiles = 100;
// The masters and two moments of a tile of AdamW.
constexpr uint64_t kTileBytes = 3 * kTileElements * sizeof(float);
constexpr uint64_t kAllBytes = kTiles * kTileBytes;
// The header of an entry of the log, and a gradient.
constexpr uint64_t kEntryBytes = 128 + kTileElements * sizeof(float);

ParameterSpec Tiles(const std::string& name, uint64_t tiles, DType dtype) {
  ParameterSpec parameter;
  parameter.name = name;
  parameter.numel = static_cast<int64_t>(tiles * kTileElements);
  parameter.shape = {parameter.numel};
  parameter.dtype = parameter.gradient_dtype = dtype;
  return parameter;
}

// A job of AdamW whose parameters are their own masters, all updated by devices
// that have more room than it needs.
JobDescription WholeJob() {
  LayoutSpec layout;
  layout.groups.resize(1);
  layout.parameters = {Tiles("a", kTiles, DType::kFloat32)};
  JobDescription description;
  description.layout = *Layout::Make(std::move(layout));
  description.storage.set_offload_fraction(0);
  description.storage.set_device_budget_bytes(uint64_t{1} << 40);
  return description;
}

void SetLayout(DType dtype, MasterFormat master, JobDescription* description) {
  LayoutSpec layout;
  layout.groups.resize(1);
  layout.master_format = master;
  layout.parameters = {Tiles("a", kTiles, dtype)};
  description->layout = *Layout::Make(std::move(layout));
}

void ExpectNoneStay(const JobDescription& description, size_t devices) {
  EXPECT_EQ(ResidentSizesOf(description, devices).device_bytes, 0u);
  EXPECT_EQ(ResidentSizesOf(description, devices).batch_bytes, 0u);
  EXPECT_EQ(ResidentSizesOf(description, devices).parameter_bytes, 0u);
  EXPECT_EQ(GradientLogBytes(description, devices), 0u);
}

TEST(ResidentSizesTest, OneDeviceHasAllOfASmallJob) {
  const ResidentSizes sizes = ResidentSizesOf(WholeJob(), 1);
  EXPECT_EQ(sizes.device_bytes, kAllBytes);
  EXPECT_EQ(sizes.log.tiles, kTiles);
  EXPECT_EQ(sizes.log.step_bytes, kTiles * kEntryBytes);
  EXPECT_EQ(sizes.log.parameter_bytes, kTiles * kTileElements * sizeof(float));
  EXPECT_EQ(sizes.batch_bytes, 2 * sizes.log.step_bytes);
  EXPECT_EQ(sizes.parameter_bytes, kTiles * kTileElements * sizeof(float));
  EXPECT_EQ(GradientLogBytes(WholeJob(), 1),
            GradientLog::BytesNeeded(sizes.log));
}

TEST(ResidentSizesTest, WithoutAShareOrABudgetNoneStay) {
  ExpectNoneStay(WholeJob(), /*devices=*/0);
  JobDescription none = WholeJob();
  none.storage.clear_device_budget_bytes();
  ExpectNoneStay(none, 1);
  none = WholeJob();
  none.storage.clear_offload_fraction();
  ExpectNoneStay(none, 1);
  none = WholeJob();
  none.speculative = true;
  ExpectNoneStay(none, 1);
}

// Each device has its part, and a few tiles at its border.
TEST(ResidentSizesTest, DevicesShareTheirFraction) {
  for (const size_t devices : {1, 2, 4}) {
    for (const double fraction : {0.0, 0.25, 0.5}) {
      JobDescription description = WholeJob();
      description.storage.set_offload_fraction(fraction);
      const double part = static_cast<double>(kAllBytes) * (1 - fraction) /
                          static_cast<double>(devices);
      const uint64_t bytes = ResidentSizesOf(description, devices).device_bytes;
      EXPECT_GE(static_cast<double>(bytes), part);
      EXPECT_LE(static_cast<double>(bytes),
                part + 8 * static_cast<double>(kTileBytes));
    }
  }
}

// The parameters of a device's records have room for ranks to copy them.
TEST(ResidentSizesTest, ParametersOfWhatStaysCanBeShared) {
  for (const size_t devices : {1, 2, 4}) {
    for (const uint64_t tiles : {3, 20, 1000}) {
      JobDescription description = WholeJob();
      SetLayout(DType::kBFloat16, MasterFormat::kFloat32, &description);
      description.storage.set_device_budget_bytes(tiles * kTileBytes);
      const ResidentSizes sizes = ResidentSizesOf(description, devices);
      const uint64_t stay =
          std::min(kTiles / devices, sizes.device_bytes / kTileBytes);
      EXPECT_GE(sizes.parameter_bytes, stay * kTileElements * 2);
      EXPECT_LE(sizes.parameter_bytes, kTiles * kTileElements * 2);
    }
  }
}

TEST(ResidentSizesTest, TheBudgetIsOfEachDevice) {
  JobDescription description = WholeJob();
  description.storage.set_device_budget_bytes(10 * kTileBytes);
  const ResidentSizes one = ResidentSizesOf(description, 1);
  EXPECT_EQ(one.device_bytes, 10 * kTileBytes);
  const ResidentSizes two = ResidentSizesOf(description, 2);
  EXPECT_EQ(two.device_bytes, 10 * kTileBytes);
  EXPECT_LT(one.log.step_bytes, two.log.step_bytes);
  EXPECT_LT(two.log.step_bytes, kTiles * kEntryBytes);
}

// A tile that a device has room for has its place in the log too.
TEST(ResidentSizesTest, TheLogHasRoomForWhatStays) {
  struct alignas(GradientLog::kAlignBytes) Line {
    std::byte bytes[GradientLog::kAlignBytes];
  };
  for (uint64_t tiles = 1; tiles <= kTiles; tiles += 7) {
    for (const size_t devices : {1, 3}) {
      JobDescription description = WholeJob();
      description.storage.set_device_budget_bytes(tiles * kTileBytes);
      const ResidentSizes sizes = ResidentSizesOf(description, devices);
      std::vector<Line> file(
          (GradientLogBytes(description, devices) + sizeof(Line) - 1) /
          sizeof(Line));
      GradientLog log(absl::MakeSpan(reinterpret_cast<std::byte*>(file.data()),
                                     file.size() * sizeof(Line)));
      log.Begin(sizes.log);
      const uint64_t fit =
          std::min(kTiles, devices * (sizes.device_bytes / kTileBytes));
      for (uint64_t tile = 0; tile < fit; ++tile) {
        ASSERT_TRUE(log.AddTile(tile, {kTileElements * sizeof(float),
                                       kTileElements * sizeof(float)}))
            << tile << " of " << fit << " on " << devices;
      }
    }
  }
}

// Which of them come first is not known when the log is made.
TEST(ResidentSizesTest, TheLogHasRoomForWhicheverRecordsStay) {
  JobDescription description = WholeJob();
  LayoutSpec layout;
  layout.groups.resize(1);
  layout.parameters = {Tiles("a", 80, DType::kBFloat16),
                       Tiles("b", 240, DType::kFloat32)};
  description.layout = *Layout::Make(std::move(layout));
  description.storage.set_device_budget_bytes(200 * kTileBytes);
  const ResidentSizes sizes = ResidentSizesOf(description, 1);
  EXPECT_GE(sizes.log.step_bytes, 200 * kEntryBytes);
  EXPECT_GE(sizes.log.parameter_bytes, 200 * kTileElements * sizeof(float));
  EXPECT_LT(sizes.log.step_bytes, 220 * kEntryBytes);
}

TEST(ResidentSizesTest, MastersBesideParametersAreNotLogged) {
  JobDescription description = WholeJob();
  SetLayout(DType::kBFloat16, MasterFormat::kFloat32, &description);
  const ResidentSizes sizes = ResidentSizesOf(description, 1);
  EXPECT_EQ(sizes.device_bytes, kAllBytes);
  EXPECT_EQ(sizes.log.parameter_bytes, 0u);
  EXPECT_EQ(sizes.log.step_bytes, kTiles * (128 + kTileElements * 2));
  // Sums of micro-steps are floats.
  description.accumulate = true;
  EXPECT_EQ(ResidentSizesOf(description, 1).log.step_bytes,
            kTiles * kEntryBytes);
}

// An array that an option of a group brings is in that group's records alone.
TEST(ResidentSizesTest, OnlyArraysThatTheGroupHasCount) {
  JobDescription description = WholeJob();
  LayoutSpec layout;
  layout.groups = {{}, {adam::kAmsgrad}};
  layout.parameters = {Tiles("a", 2, DType::kFloat32),
                       Tiles("b", 3, DType::kFloat32)};
  layout.parameters[1].group = 1;
  description.layout = *Layout::Make(std::move(layout));
  EXPECT_EQ(ResidentSizesOf(description, 1).device_bytes,
            2 * kTileBytes + 3 * kTileBytes / 3 * 4);
}

TEST(ResidentSizesTest, BatchesAreBounded) {
  JobDescription description = WholeJob();
  LayoutSpec layout;
  layout.groups.resize(1);
  layout.parameters = {Tiles("a", 5000, DType::kFloat32)};
  description.layout = *Layout::Make(std::move(layout));
  EXPECT_EQ(ResidentSizesOf(description, 1).batch_bytes,
            scheduler::DeviceUpdateExecutor::kResidentBytes);
}

TEST(ResidentSizesTest, RefusesWhatCannotStay) {
  EXPECT_TRUE(CheckResidents(WholeJob()).ok());
  JobDescription speculative = WholeJob();
  speculative.speculative = true;
  const absl::Status rolls_back = CheckResidents(speculative);
  EXPECT_TRUE(absl::IsFailedPrecondition(rolls_back)) << rolls_back;
  EXPECT_THAT(rolls_back.message(), HasSubstr("device_budget and speculative"));
  speculative.storage.clear_device_budget_bytes();
  EXPECT_TRUE(CheckResidents(speculative).ok()) << "nothing is to stay";
}

TEST(ResidentSizesTest, HalvesOfMastersTakeAsMuchAsWholeOnes) {
  JobDescription description = WholeJob();
  SetLayout(DType::kBFloat16, MasterFormat::kSplit, &description);
  EXPECT_TRUE(CheckResidents(description).ok());
  const ResidentSizes sizes = ResidentSizesOf(description, 1);
  EXPECT_EQ(sizes.device_bytes, kAllBytes);
  EXPECT_EQ(sizes.log.parameter_bytes, kTiles * kTileElements * 2);
}

TEST(ResidentSizesTest, GradientsOfSeveralRanksAreLoggedAsOneSum) {
  JobDescription description = WholeJob();
  SetLayout(DType::kBFloat16, MasterFormat::kFloat32, &description);
  description.partition = PartitionMode::kReplicated;
  EXPECT_EQ(ResidentSizesOf(description, 1).log.step_bytes,
            kTiles * (128 + kTileElements * 2));
  description.world_size = 2;
  EXPECT_TRUE(CheckResidents(description).ok());
  const ResidentSizes sizes = ResidentSizesOf(description, 1);
  EXPECT_EQ(sizes.log_content, scheduler::GradientLog::Content::kSum);
  EXPECT_EQ(sizes.log.step_bytes, kTiles * kEntryBytes);
  // Sums of micro-steps are of all ranks already.
  description.accumulate = true;
  EXPECT_EQ(ResidentSizesOf(description, 1).log_content,
            scheduler::GradientLog::Content::kGradient);
}

// Returns a job of LAMB with square matrices of so many rows.
JobDescription JobOfMatrices(const std::vector<int64_t>& rows,
                             StateFormat state = StateFormat::kFloat32) {
  LayoutSpec layout;
  layout.optimizer = OptimizerKind::kLamb;
  layout.state_format = state;
  layout.groups.resize(1);
  for (const int64_t each : rows) {
    ParameterSpec parameter;
    parameter.name = "m" + std::to_string(layout.parameters.size());
    parameter.shape = {each, each};
    parameter.numel = each * each;
    layout.parameters.push_back(parameter);
  }
  JobDescription description = WholeJob();
  description.layout = *Layout::Make(std::move(layout));
  return description;
}

TEST(ResidentSizesTest, WholeParametersHaveCopiesAndNoLog) {
  constexpr uint64_t kMatrix = 64 * 64 * sizeof(float);
  const JobDescription description = JobOfMatrices({64, 64, 64, 64});
  const ResidentSizes sizes = ResidentSizesOf(description, 1);
  EXPECT_EQ(sizes.device_bytes, 4 * 3 * kMatrix);
  EXPECT_EQ(sizes.log.tiles, 0u);
  EXPECT_EQ(sizes.parameter_bytes, 0u);
  EXPECT_EQ(GradientLogBytes(description, 1), 0u);
  EXPECT_EQ(sizes.batch_host_bytes,
            scheduler::DeviceUpdateExecutor::BatchBytesFor(description.layout));
  // Half, and room for one at the border.
  EXPECT_EQ(ResidentSizesOf(description, 2).device_bytes, 3 * 3 * kMatrix);
  // States of another format than floats are not kept.
  EXPECT_EQ(ResidentSizesOf(
                JobOfMatrices({64, 64, 64, 64}, StateFormat::kBFloat16), 1)
                .device_bytes,
            4 * kMatrix);
}

TEST(ResidentSizesTest, AParameterThatNoBatchHasRoomForTakesNoPlace) {
  const JobDescription description = JobOfMatrices({4096, 64});
  EXPECT_EQ(ResidentSizesOf(description, 1).device_bytes,
            3 * 64 * 64 * sizeof(float));
  ExpectNoneStay(JobOfMatrices({4096}), 1);
  // It is the CPU's, and so devices have all others.
  JobDescription shared = JobOfMatrices({4096, 64, 64});
  shared.storage.set_offload_fraction(0.5);
  EXPECT_EQ(ResidentSizesOf(shared, 1).device_bytes,
            2 * 3 * 64 * 64 * sizeof(float));
}

}  // namespace
}  // namespace optstate::session
