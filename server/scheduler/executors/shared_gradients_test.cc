#include "server/scheduler/executors/shared_gradients.h"

#include <fcntl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "proto/shm/device_gradients.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/partition.h"
#include "proto/types/unique_fd.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::scheduler {
namespace {

constexpr uint64_t kParameters = 4;
constexpr uint64_t kMemoryBytes = 8192;
constexpr uint64_t kAreaBytes = 8192;
constexpr uint32_t kRank = 2;
constexpr size_t kDevice = 1;
constexpr uint64_t kStep = 5;

// A rank that has pieces of parameters 1 and 3, at these bytes of its area.
RankPartition Partition() {
  RankPartition partition;
  partition.pieces.push_back({1, 0, 100, 0});
  partition.pieces.push_back({3, 0, 500, 4096});
  partition.gradient_area_bytes = kAreaBytes;
  return partition;
}

class SharedGradientsTest : public testing::Test {
 protected:
  SharedGradientsTest()
      : ranks_runtime_(accelerator::MakeEmulatedRuntime({.devices = 1})),
        runtime_(accelerator::MakeEmulatedRuntime({.devices = 1})),
        ranks_device_(*ranks_runtime_->Open(0)),
        device_(*runtime_->Open(0)),
        memory_(*ranks_device_->AllocateShareable(kMemoryBytes)),
        table_(*shm::SealedSegment::Create(
            "table", shm::DeviceGradientsBytes(kParameters))),
        area_(kAreaBytes) {
    header()->magic = shm::kDeviceGradientsMagic;
    header()->version = shm::kDeviceGradientsVersion;
    header()->segment_bytes = table_.size();
    header()->parameter_count = kParameters;
  }

  shm::DeviceGradientsHeader* header() const {
    return reinterpret_cast<shm::DeviceGradientsHeader*>(table_.data());
  }
  void Put(uint32_t parameter, uint64_t place, uint64_t step) const {
    auto* const entries = reinterpret_cast<shm::DeviceGradient*>(header() + 1);
    entries[parameter].place = place;
    entries[parameter].step = step;
  }
  SharedGradients::Shared Shared() const {
    SharedGradients::Shared shared;
    shared.rank = kRank;
    shared.device = device_.get();
    shared.device_index = kDevice;
    shared.memory = *ranks_device_->Export(memory_);
    shared.table = UniqueFd(fcntl(table_.fd(), F_DUPFD_CLOEXEC, 0));
    shared.area = area_.data();
    shared.parameter_count = kParameters;
    return shared;
  }
  absl::Status Map() { return gradients_.Map(Shared(), Partition()); }
  // Returns the address for a byte of the area.
  uint64_t Find(uint32_t parameter, uint64_t at, uint64_t bytes = 16,
                uint64_t step = kStep, size_t device = kDevice) const {
    return gradients_.Find(device, parameter, step, area_.data() + at, bytes)
        .value;
  }

  const std::unique_ptr<accelerator::DeviceRuntime> ranks_runtime_;
  const std::unique_ptr<accelerator::DeviceRuntime> runtime_;
  const std::unique_ptr<accelerator::Device> ranks_device_;
  const std::unique_ptr<accelerator::Device> device_;
  const accelerator::DeviceAddress memory_;
  const shm::SealedSegment table_;
  std::vector<std::byte> area_;
  SharedGradients gradients_;
};

TEST_F(SharedGradientsTest, FindsWhatHasTheStep) {
  EXPECT_EQ(Find(1, 0), 0u) << "nothing is mapped";
  const absl::Status mapped = Map();
  ASSERT_TRUE(mapped.ok()) << mapped;
  EXPECT_EQ(Find(1, 0), 0u) << "nothing is there";
  Put(1, 1024, kStep);
  Put(3, 2048, kStep);
  const uint64_t first = Find(1, 0);
  ASSERT_NE(first, 0u);
  EXPECT_EQ(Find(1, 64), first + 64);
  EXPECT_EQ(Find(3, 4096), first + 1024);
  EXPECT_EQ(Find(3, 4096 + 256), first + 1024 + 256);
}

TEST_F(SharedGradientsTest, AnotherStepDoesNotCount) {
  ASSERT_TRUE(Map().ok());
  for (const uint64_t step : {kStep - 1, kStep + 1, uint64_t{0}}) {
    Put(1, 0, step);
    EXPECT_EQ(Find(1, 0), 0u) << "the gradient of step " << step;
  }
  Put(1, 0, kStep);
  EXPECT_NE(Find(1, 0), 0u);
}

TEST_F(SharedGradientsTest, NorDoesWhatIsElsewhere) {
  ASSERT_TRUE(Map().ok());
  for (uint32_t p = 0; p < kParameters; ++p) Put(p, 0, kStep);
  EXPECT_EQ(Find(1, 0, 16, kStep, kDevice + 1), 0u) << "another device";
  EXPECT_EQ(Find(0, 0), 0u) << "the rank has no piece of it";
  EXPECT_EQ(Find(2, 0), 0u) << "between those that it has";
  EXPECT_EQ(Find(3, 0), 0u) << "before the piece";
  EXPECT_EQ(Find(kParameters, 0), 0u) << "not of the layout";
  EXPECT_EQ(Find(1, kAreaBytes), 0u) << "behind the area";
  const std::byte other{};
  EXPECT_TRUE(gradients_.Find(kDevice, 1, kStep, &other, 16).is_null());
}

// The table is the rank's, which may write anything there.
TEST_F(SharedGradientsTest, APlaceThatIsNotInTheMemoryDoesNotCount) {
  ASSERT_TRUE(Map().ok());
  Put(1, kMemoryBytes - 64, kStep);
  EXPECT_NE(Find(1, 0, 64), 0u);
  EXPECT_EQ(Find(1, 0, 65), 0u);
  EXPECT_EQ(Find(1, 16, 64), 0u);
  EXPECT_EQ(Find(1, 128, 16), 0u);
  for (const uint64_t place : {kMemoryBytes + 1, ~uint64_t{0}, ~uint64_t{63}}) {
    Put(1, place, kStep);
    EXPECT_EQ(Find(1, 0), 0u) << place;
    EXPECT_EQ(Find(1, 128), 0u) << place;
  }
}

// A load of a vector from there would lose the device.
TEST_F(SharedGradientsTest, APlaceThatIsNotAlignedDoesNotCount) {
  ASSERT_TRUE(Map().ok());
  for (const uint64_t place : {1026, 1032, 1039}) {
    Put(1, place, kStep);
    EXPECT_EQ(Find(1, 0), 0u) << place;
  }
  Put(1, 1040, kStep);
  EXPECT_NE(Find(1, 0), 0u);
}

TEST_F(SharedGradientsTest, WhoHadOtherBytesIsNotAskedAgain) {
  ASSERT_TRUE(Map().ok());
  Put(1, 0, kStep);
  Put(3, 512, kStep);
  const std::byte other{};
  gradients_.Distrust(&other);  // of no rank
  EXPECT_NE(Find(1, 0), 0u);
  gradients_.Distrust(area_.data() + 5000);
  EXPECT_EQ(Find(1, 0), 0u);
  EXPECT_EQ(Find(3, 4096), 0u);
  // Until the rank shares its memory anew.
  ASSERT_TRUE(Map().ok());
  EXPECT_NE(Find(1, 0), 0u);
}

TEST_F(SharedGradientsTest, MemoryIsGivenBack) {
  ASSERT_TRUE(Map().ok());
  ASSERT_TRUE(Map().ok()) << "in place of the former";
  Put(1, 0, kStep);
  EXPECT_NE(Find(1, 0), 0u);
  gradients_.Unmap(kRank + 1);
  EXPECT_FALSE(gradients_.empty());
  gradients_.Unmap(kRank);
  EXPECT_TRUE(gradients_.empty());
  EXPECT_EQ(Find(1, 0), 0u);
  gradients_.Unmap(kRank);
}

TEST_F(SharedGradientsTest, ATableOrAMemoryThatIsNoneIsRefused) {
  const auto refused = [this](SharedGradients::Shared shared) {
    EXPECT_TRUE(Map().ok());
    const absl::Status status = gradients_.Map(std::move(shared), Partition());
    EXPECT_TRUE(gradients_.empty()) << "the former is gone too";
    return absl::IsInvalidArgument(status);
  };
  SharedGradients::Shared wrong = Shared();
  wrong.table.reset();
  EXPECT_FALSE(gradients_.Map(std::move(wrong), Partition()).ok());
  wrong = Shared();
  wrong.parameter_count = 10 * kParameters;
  EXPECT_TRUE(refused(std::move(wrong))) << "it has other parameters";
  wrong = Shared();
  wrong.memory.bytes *= 2;
  EXPECT_TRUE(refused(std::move(wrong))) << "it has fewer bytes";
  wrong = Shared();
  wrong.memory.device = "another";
  EXPECT_TRUE(refused(std::move(wrong)));
  header()->version = 2;
  EXPECT_FALSE(Map().ok());
  header()->version = shm::kDeviceGradientsVersion;
  header()->magic = 0;
  EXPECT_FALSE(Map().ok());
}

}  // namespace
}  // namespace optstate::scheduler
