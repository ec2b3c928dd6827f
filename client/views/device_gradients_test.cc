#include "client/views/device_gradients.h"

#include <fcntl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/device_gradients.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

constexpr uint64_t kMemoryBytes = 4096;
constexpr uint64_t kStep = 7;

ParameterSpec BFloat16(const std::string& name, int64_t numel) {
  return {.name = name,
          .shape = {numel},
          .numel = numel,
          .dtype = DType::kBFloat16,
          .gradient_dtype = DType::kBFloat16,
          .group = 0};
}

class DeviceGradientsTest : public testing::Test {
 protected:
  DeviceGradientsTest()
      : layout_(*Layout::Make(
            {.optimizer = OptimizerKind::kAdamW,
             .groups = {{.options = 0}},
             .parameters = {BFloat16("a", 100), BFloat16("b", 200),
                            BFloat16("c", 300)}})) {
    // The rank has no piece of "b".
    partition_.pieces.push_back({0, 0, 100, 0});
    partition_.pieces.push_back({2, 0, 300, 4096});
    partition_.gradient_area_bytes = 8192;
    gradients_ = *DeviceGradients::Make(layout_, partition_, kMemoryBytes,
                                        /*connection=*/3);
    UniqueFd table(fcntl(gradients_->table_file(), F_DUPFD_CLOEXEC, 0));
    auto mapped =
        shm::PeerSegment::Map(std::move(table), shm::DeviceGradientsBytes(3));
    EXPECT_TRUE(mapped.ok()) << mapped.status();
    table_ = *std::move(mapped);
  }

  // As an engine sees them.
  const shm::DeviceGradientsHeader& header() const {
    return *reinterpret_cast<const shm::DeviceGradientsHeader*>(table_.data());
  }
  uint64_t StepOf(uint32_t parameter) const {
    return entries()[parameter].step.load();
  }
  uint64_t PlaceOf(uint32_t parameter) const {
    return entries()[parameter].place.load();
  }
  absl::Status Mark(const std::vector<uint32_t>& parameters,
                    const std::vector<uint64_t>& offsets,
                    uint64_t step = kStep) {
    return gradients_->Mark(step, parameters, offsets);
  }

  const Layout layout_;
  RankPartition partition_;
  std::unique_ptr<DeviceGradients> gradients_;
  shm::PeerSegment table_;

 private:
  const shm::DeviceGradient* entries() const {
    return reinterpret_cast<const shm::DeviceGradient*>(&header() + 1);
  }
};

TEST_F(DeviceGradientsTest, AnEngineSeesWhatIsThere) {
  EXPECT_EQ(header().magic, shm::kDeviceGradientsMagic);
  EXPECT_EQ(header().version, shm::kDeviceGradientsVersion);
  EXPECT_EQ(header().segment_bytes, table_.size());
  EXPECT_EQ(header().parameter_count, 3u);
  EXPECT_EQ(gradients_->connection(), 3u);
  for (uint32_t p = 0; p < 3; ++p) EXPECT_EQ(StepOf(p), 0u);
  const absl::Status marked = Mark({0, 2}, {256, 1024});
  ASSERT_TRUE(marked.ok()) << marked;
  EXPECT_EQ(StepOf(0), kStep);
  EXPECT_EQ(PlaceOf(0), 256u);
  EXPECT_EQ(StepOf(1), 0u);
  EXPECT_EQ(StepOf(2), kStep);
  EXPECT_EQ(PlaceOf(2), 1024u);
  const std::vector<uint32_t> cleared = {0, 1};
  ASSERT_TRUE(gradients_->Clear(cleared).ok());
  EXPECT_EQ(StepOf(0), 0u);
  EXPECT_EQ(StepOf(2), kStep);
}

TEST_F(DeviceGradientsTest, WhatCannotBeThereIsRefused) {
  // The last place of each, as gradients begin at multiples of 16.
  EXPECT_TRUE(Mark({0, 2}, {kMemoryBytes - 208, kMemoryBytes - 608}).ok());
  const std::vector<uint32_t> all = {0, 1, 2};
  ASSERT_TRUE(gradients_->Clear(all).ok());
  const auto refusal = [this](const std::vector<uint32_t>& parameters,
                              const std::vector<uint64_t>& offsets,
                              uint64_t step = kStep) {
    const absl::Status refused = Mark(parameters, offsets, step);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    for (uint32_t p = 0; p < 3; ++p) EXPECT_EQ(StepOf(p), 0u);
    return std::string(refused.message());
  };
  EXPECT_THAT(refusal({0, 1}, {0, 512}), HasSubstr("parameter 1"));
  EXPECT_THAT(refusal({3}, {0}), HasSubstr("parameter 3"));
  EXPECT_THAT(refusal({0, 2}, {0, kMemoryBytes - 592}), HasSubstr("600 bytes"));
  EXPECT_THAT(refusal({0}, {~uint64_t{0}}), HasSubstr("200 bytes"));
  for (const uint64_t offset : {1, 8, 24, 1039}) {
    EXPECT_THAT(refusal({0, 2}, {0, offset}),
                HasSubstr(absl::StrCat("parameter 2 is at offset ", offset)));
  }
  EXPECT_THAT(refusal({0}, {0}, 0), HasSubstr("step 0"));
  const std::vector<uint32_t> unknown = {0, 3};
  EXPECT_TRUE(absl::IsInvalidArgument(gradients_->Clear(unknown)));
}

}  // namespace
}  // namespace optstate::client
