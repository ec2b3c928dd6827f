#include "server/session/durability/job_storage.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kBudget = 1 << 20;

v1::StorageSettings Keeping(v1::Placement placement = v1::PLACEMENT_HOST) {
  v1::StorageSettings storage;
  storage.set_placement(placement);
  storage.set_durability(v1::DURABILITY_KIND_NONE);
  storage.set_offload_fraction(0.5);
  storage.set_device_budget_bytes(kBudget);
  return storage;
}

v1::DaemonConfig WithDisk() {
  v1::DaemonConfig config;
  config.mutable_nvme()->add_directories("/disk");
  return config;
}

absl::Status Check(const v1::StorageSettings& storage) {
  return CheckStorage(storage, WithDisk());
}

void ExpectInvalid(const absl::Status& status, const std::string& text) {
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

TEST(JobStorageTest, ADeviceBudgetIsForParametersInHostMemory) {
  for (const auto placement : {v1::PLACEMENT_HOST, v1::PLACEMENT_UNSPECIFIED,
                               v1::PLACEMENT_NVME, v1::PLACEMENT_AUTO}) {
    for (const auto durability :
         {v1::DURABILITY_KIND_NONE, v1::DURABILITY_KIND_STEP}) {
      v1::StorageSettings storage = Keeping(placement);
      storage.set_durability(durability);
      EXPECT_EQ(Check(storage), absl::OkStatus());
      EXPECT_EQ(DeviceBudgetOf(ResolveStorage(storage, WithDisk())), kBudget);
    }
  }
  v1::StorageSettings on_disk = Keeping(v1::PLACEMENT_NVME);
  on_disk.set_parameters_on_disk(true);
  ExpectInvalid(Check(on_disk), "not for parameters_on_disk");
  on_disk.clear_device_budget_bytes();
  EXPECT_EQ(Check(on_disk), absl::OkStatus());
}

TEST(JobStorageTest, ADeviceBudgetIsForWhatDevicesUpdate) {
  v1::StorageSettings storage = Keeping();
  storage.set_offload_fraction(0);
  EXPECT_EQ(Check(storage), absl::OkStatus());
  storage.set_offload_fraction(1);
  ExpectInvalid(Check(storage), "set offload_fraction below 1");
  storage.clear_offload_fraction();
  ExpectInvalid(Check(storage), "set offload_fraction below 1");
  storage.clear_device_budget_bytes();
  EXPECT_EQ(Check(storage), absl::OkStatus());
  EXPECT_EQ(DeviceBudgetOf(storage), 0u);
}

TEST(JobStorageTest, ScriptsAskForTheDeviceBudgetThatWasOrIs) {
  v1::StorageSettings now = Keeping();
  *now.mutable_made_with() = Keeping();
  now.set_device_budget_bytes(2 * kBudget);
  v1::StorageSettings asked;
  for (const uint64_t budget : {uint64_t{0}, kBudget, 2 * kBudget}) {
    asked.set_device_budget_bytes(budget);
    EXPECT_EQ(CheckSameStorage(now, asked), absl::OkStatus()) << budget;
  }
  asked.set_device_budget_bytes(3 * kBudget);
  const absl::Status other = CheckSameStorage(now, asked);
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(
      std::string(other.message()),
      HasSubstr("device_budget 2097152, this session asks for 3145728"));
}

TEST(JobStorageTest, ADeviceBudgetIsChangedAndTurnedOff) {
  v1::SetJobRequest request;
  request.set_device_budget_bytes(2 * kBudget);
  auto changed = ChangeStorage(Keeping(), request, {});
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(DeviceBudgetOf(*changed), 2 * kBudget);
  EXPECT_EQ(DeviceBudgetOf(changed->made_with()), kBudget);
  request.set_device_budget_bytes(0);
  changed = ChangeStorage(*changed, request, {});
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(DeviceBudgetOf(*changed), 0u);
  // Another setting leaves it alone.
  request.Clear();
  request.set_offload_fraction(0.25);
  changed = ChangeStorage(Keeping(), request, {});
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(DeviceBudgetOf(*changed), kBudget);
}

TEST(JobStorageTest, FramesTakeWhatWholeOnesCanOfABudget) {
  const storage::SwapSizes sizes = {.frame = 32768, .records = 12};
  v1::StorageSettings swapped;
  swapped.set_placement(v1::PLACEMENT_NVME);
  const auto frames = [&](uint64_t budget) {
    swapped.set_host_budget_bytes(budget);
    const uint64_t bytes = FrameBytesOf(swapped, sizes);
    EXPECT_EQ(bytes % sizes.frame, 0u);
    EXPECT_LE(bytes, budget);
    return bytes / sizes.frame;
  };
  EXPECT_EQ(frames(3 * 32768), 3u);
  EXPECT_EQ(frames(4 * 32768 - 1), 3u);
  EXPECT_EQ(frames(4 * 32768), 4u);
  EXPECT_EQ(frames(12 * 32768), 12u);
  EXPECT_EQ(frames(1 << 30), 12u) << "no more than there are records";
  // Less is refused before (CheckBudgetHolds).
  swapped.set_host_budget_bytes(3 * 32768 - 1);
  EXPECT_EQ(FrameBytesOf(swapped, sizes), 3u * 32768);
  ExpectInvalid(CheckBudgetHolds(3 * 32768 - 1, sizes), "set at least 98304");
}

TEST(JobStorageTest, AChangeIsRefusedAsANewJobIs) {
  v1::SetJobRequest request;
  request.set_offload_fraction(1);
  request.set_device_budget_bytes(kBudget);
  ExpectInvalid(ChangeStorage(Keeping(), request, {}).status(),
                "set offload_fraction below 1");
  // The budget waits for a smaller fraction.
  request.clear_device_budget_bytes();
  EXPECT_TRUE(ChangeStorage(Keeping(), request, {}).ok());
  v1::StorageSettings on_disk = Keeping(v1::PLACEMENT_NVME);
  on_disk.set_parameters_on_disk(true);
  on_disk.clear_device_budget_bytes();
  request.Clear();
  request.set_device_budget_bytes(kBudget);
  ExpectInvalid(ChangeStorage(on_disk, request, {}).status(),
                "not for parameters_on_disk");
}

}  // namespace
}  // namespace optstate::session
