#include "storage/host_tier.h"

#include <linux/capability.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace optstate {
namespace {

namespace fs = std::filesystem;

Layout LayoutOf(std::vector<bool> amsgrad, int64_t numel = 5000) {
  LayoutSpec spec;
  for (uint32_t group = 0; group < amsgrad.size(); ++group) {
    spec.groups.push_back({amsgrad[group]});
    ParameterSpec parameter;
    parameter.name = "p" + std::to_string(group);
    parameter.shape = {numel};
    parameter.numel = numel;
    parameter.group = group;
    // Whose masters are an array.
    parameter.dtype = DType::kBFloat16;
    spec.parameters.push_back(parameter);
  }
  return *Layout::Make(std::move(spec));
}

constexpr Accumulation kNoSums;
constexpr Accumulation kSums = AccumulateDType::kFloat32;

float* Masters(const StateArrays& arrays) {
  return reinterpret_cast<float*>(arrays.master);
}

float* Floats(const StateArrays& arrays, int index) {
  return reinterpret_cast<float*>(arrays.state[index]);
}

// From here on the calling thread, of root too, writes only where it may.
void ObeyPermissions() {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct sets[2] = {};
  ASSERT_EQ(::syscall(SYS_capget, &header, sets), 0);
  sets[0].effective &= ~(1u << CAP_DAC_OVERRIDE);
  ASSERT_EQ(::syscall(SYS_capset, &header, sets), 0);
}

class HostTierTest : public ::testing::Test {
 protected:
  HostTierTest() {
    std::string name = ::testing::TempDir() + "/host_tier-XXXXXX";
    directory_ = ::mkdtemp(name.data());
  }
  ~HostTierTest() override { fs::remove_all(directory_); }

  absl::StatusOr<HostTier> OpenWith(const Layout& layout,
                                    Accumulation accumulation) {
    const auto description = HostTier::ReadDescription(directory_);
    if (!description.ok()) return description.status();
    return HostTier::Open(directory_, layout, accumulation, *description);
  }
  size_t FileCount() const {
    size_t count = 0;
    for ([[maybe_unused]] const auto& file :
         fs::directory_iterator(directory_ + "/state")) {
      ++count;
    }
    return count;
  }

  std::string directory_;
};

TEST_F(HostTierTest, EmptyDirectoryHasNoJob) {
  EXPECT_EQ(HostTier::ReadDescription(directory_).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(HostTierTest, WhatIsWrittenIsThereAfterReopening) {
  const Layout layout = LayoutOf({false, true});
  {
    auto tier = HostTier::Create(directory_, layout, kSums, "description");
    ASSERT_TRUE(tier.ok()) << tier.status();
    EXPECT_EQ(tier->bytes(), HostTier::BytesNeeded(layout, kSums));
    const StateArrays arrays = tier->arrays();
    Masters(arrays)[0] = 1;
    Floats(arrays, 0)[layout.flat_elements() - 1] = 2;
    Floats(arrays, 2)[layout.flat_elements() - 1] = 3;
    arrays.accumulator[5] = 4;
    arrays.step_counts[1] = 5;
    EXPECT_EQ(Floats(arrays, 1)[0], 0);
  }
  const auto description = HostTier::ReadDescription(directory_);
  ASSERT_TRUE(description.ok());
  EXPECT_EQ(description->payload, "description");
  auto tier = OpenWith(layout, kSums);
  ASSERT_TRUE(tier.ok()) << tier.status();
  const StateArrays arrays = tier->arrays();
  EXPECT_EQ(Masters(arrays)[0], 1);
  EXPECT_EQ(Floats(arrays, 0)[layout.flat_elements() - 1], 2);
  EXPECT_EQ(Floats(arrays, 2)[layout.flat_elements() - 1], 3);
  EXPECT_EQ(arrays.accumulator[5], 4);
  EXPECT_EQ(arrays.step_counts[1], 5);
}

// proto/shm/spread_mapping.h: none begins at the same place of 256 MiB.
TEST_F(HostTierTest, LargeArraysAreSpread) {
  auto tier =
      HostTier::Create(directory_, LayoutOf({false}, 600000), kSums, "");
  ASSERT_TRUE(tier.ok()) << tier.status();
  const StateArrays arrays = tier->arrays();
  std::set<uint64_t> places;
  for (const void* data : {static_cast<const void*>(Masters(arrays)),
                           static_cast<const void*>(Floats(arrays, 0)),
                           static_cast<const void*>(Floats(arrays, 1)),
                           static_cast<const void*>(arrays.accumulator)}) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    EXPECT_EQ(address % (2 << 20), 0);
    places.insert(address % (256 << 20));
  }
  EXPECT_EQ(places.size(), 4);
}

// What a creation that died has left, where it cannot be removed.
TEST_F(HostTierTest, AnEmptyStepFileThatCannotBeRemovedIsAnError) {
  auto tier = HostTier::Create(directory_, LayoutOf({false}), kNoSums, "");
  ASSERT_TRUE(tier.ok()) << tier.status();
  const std::string folder = directory_ + "/state";
  std::ofstream(folder + "/redo").close();
  ASSERT_EQ(::chmod(folder.c_str(), 0555), 0);
  absl::Status reserved;
  std::thread([&] {
    ObeyPermissions();
    reserved = tier->ReserveRedo(4096);
  }).join();
  ASSERT_EQ(::chmod(folder.c_str(), 0755), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(reserved)) << reserved;
  EXPECT_NE(reserved.message().find("unlink " + folder + "/redo"),
            std::string::npos)
      << reserved;
  EXPECT_TRUE(tier->ReserveRedo(4096).ok());
  EXPECT_EQ(tier->redo().size(), 4096u);
}

TEST_F(HostTierTest, ArraysExistByNeed) {
  auto tier = HostTier::Create(directory_, LayoutOf({false}), kNoSums, "");
  ASSERT_TRUE(tier.ok());
  EXPECT_EQ(tier->arrays().state[2], nullptr);
  EXPECT_EQ(tier->arrays().accumulator, nullptr);
  EXPECT_EQ(tier->recovery().staged_marks, nullptr);
  EXPECT_EQ(tier->Describe(LayoutOf({false})).size(), 8u);
  EXPECT_EQ(FileCount(), 10u);  // and control, job.binpb
}

// Adafactor: only what parameters have takes memory, and what there is one of a
// row or a column is float32 in every format.
TEST_F(HostTierTest, ArraysOfRowsAndColumnsAreFloats) {
  LayoutSpec spec;
  spec.optimizer = OptimizerKind::kAdafactor;
  spec.state_format = StateFormat::kDynamic8;
  spec.groups = {{}};
  spec.parameters = {{.name = "matrix", .shape = {8, 600}, .numel = 4800},
                     {.name = "vector", .shape = {300}, .numel = 300}};
  const Layout layout = *Layout::Make(spec);
  auto tier = HostTier::Create(directory_, layout, kNoSums, "");
  ASSERT_TRUE(tier.ok()) << tier.status();
  std::map<std::string, std::pair<std::string, uint64_t>> found;
  for (const HostTier::ArrayInfo& array : tier->Describe(layout)) {
    found[array.file] = {array.dtype, array.bytes};
  }
  using Info = std::pair<std::string, uint64_t>;
  EXPECT_EQ(found["row_var.f32"], Info("float32", 8 * 4));
  EXPECT_EQ(found["col_var.f32"], Info("float32", 600 * 4));
  EXPECT_EQ(found["variance.dynamic8"], Info("dynamic8", 300));
  EXPECT_EQ(found["variance.scale.f32"], Info("float32", 2 * 4));
  EXPECT_EQ(tier->arrays().scale[0], nullptr);
}

TEST_F(HostTierTest, ReshapeKeepsOffsetsAndAddsArrays) {
  const Layout small = LayoutOf({false});
  const Layout large = LayoutOf({false, true, false});
  auto tier = HostTier::Create(directory_, small, kNoSums, "small");
  ASSERT_TRUE(tier.ok());
  for (uint64_t i = 0; i < small.flat_elements(); ++i) {
    Masters(tier->arrays())[i] = static_cast<float>(i);
  }
  ASSERT_TRUE(tier->Reshape(large, kSums, {}, "large").ok());
  EXPECT_EQ(tier->bytes(), HostTier::BytesNeeded(large, kSums));
  for (uint64_t i = 0; i < large.flat_elements(); ++i) {
    ASSERT_EQ(Masters(tier->arrays())[i],
              i < small.flat_elements() ? static_cast<float>(i) : 0.0f);
  }
  Floats(tier->arrays(), 2)[large.group_begin(1)] = 1;
  tier->arrays().accumulator[large.flat_elements() - 1] = 1;
  ASSERT_TRUE(tier->Reshape(large, kNoSums, {}, "without").ok());
  EXPECT_EQ(tier->arrays().accumulator, nullptr);
  EXPECT_EQ(tier->recovery().staged_marks, nullptr);
  EXPECT_EQ(FileCount(), 11u);
  ASSERT_TRUE(OpenWith(large, kNoSums).ok());
  EXPECT_EQ(HostTier::ReadDescription(directory_)->payload, "without");
}

TEST_F(HostTierTest, AFailedReshapeChangesNothing) {
  const Layout small = LayoutOf({false});
  const Layout large = LayoutOf({false, true});
  auto tier = HostTier::Create(directory_, small, kNoSums, "small");
  ASSERT_TRUE(tier.ok());
  Masters(tier->arrays())[7] = 7;
  // The description cannot be replaced: its temporary name is taken.
  fs::create_directory(directory_ + "/state/job.binpb.tmp");
  EXPECT_FALSE(tier->Reshape(large, kSums, {}, "large").ok());
  EXPECT_EQ(tier->bytes(), HostTier::BytesNeeded(small, kNoSums));
  EXPECT_EQ(Masters(tier->arrays())[7], 7);
  EXPECT_EQ(tier->arrays().accumulator, nullptr);
  fs::remove(directory_ + "/state/job.binpb.tmp");
  EXPECT_EQ(FileCount(), 10u);
  EXPECT_TRUE(OpenWith(small, kNoSums).ok());
  EXPECT_TRUE(tier->Reshape(large, kSums, {}, "large").ok());
}

TEST_F(HostTierTest, AFailedReshapeGivesBackWhatStepsWouldHaveNeeded) {
  const Layout small = LayoutOf({false});
  const Layout large = LayoutOf({false, true});
  auto tier = HostTier::Create(directory_, small, kNoSums, "small");
  ASSERT_TRUE(tier.ok());
  ASSERT_TRUE(tier->ReserveStepFiles({.undo = 10000, .redo = 20000}).ok());
  tier->redo()[19999] = std::byte{7};
  const uint64_t bytes = tier->bytes();
  const HostTier::StepFileBytes more = {
      .undo = 30000, .redo = 40000, .speculation = 50000};
  const HostTier::StepFileBytes too_much = {
      .undo = 30000, .redo = uint64_t{1} << 60, .speculation = 50000};
  fs::create_directory(directory_ + "/state/job.binpb.tmp");
  EXPECT_FALSE(tier->Reshape(large, kSums, more, "large").ok());
  fs::remove(directory_ + "/state/job.binpb.tmp");
  EXPECT_EQ(tier->bytes(), bytes);
  EXPECT_FALSE(tier->Reshape(large, kSums, too_much, "large").ok());
  EXPECT_EQ(tier->bytes(), bytes);
  EXPECT_EQ(tier->control()->undo_bytes, 10000u);
  EXPECT_EQ(tier->redo()[19999], std::byte{7});
  EXPECT_EQ(fs::file_size(directory_ + "/state/undo"), 10000u);
  EXPECT_FALSE(fs::exists(directory_ + "/state/speculation"));
  EXPECT_EQ(HostTier::ReadDescription(directory_)->payload, "small");
  ASSERT_TRUE(tier->Reshape(large, kSums, more, "large").ok());
  EXPECT_EQ(tier->redo().size(), 40000u);
}

// It grows with the workers, and what a former engine left in it stays.
TEST_F(HostTierTest, UndoIsKeptUntilItIsUsed) {
  const Layout layout = LayoutOf({false});
  {
    auto tier = HostTier::Create(directory_, layout, kNoSums, "");
    ASSERT_TRUE(tier.ok());
    ASSERT_TRUE(tier->ReserveUndo(0).ok());
    EXPECT_TRUE(tier->undo().empty());
    ASSERT_TRUE(tier->ReserveUndo(10000).ok());
    tier->undo()[9999] = std::byte{7};
    EXPECT_EQ(tier->bytes(), HostTier::BytesNeeded(layout, kNoSums) + 10000);
  }
  auto tier = OpenWith(layout, kNoSums);
  ASSERT_TRUE(tier.ok());
  EXPECT_TRUE(tier->undo().empty());
  ASSERT_TRUE(tier->ReserveUndo(0).ok());
  ASSERT_EQ(tier->undo().size(), 10000u);
  ASSERT_TRUE(tier->ReserveUndo(20000).ok());
  ASSERT_EQ(tier->undo().size(), 20000u);
  EXPECT_EQ(tier->undo()[9999], std::byte{7});
  EXPECT_EQ(tier->undo()[19999], std::byte{0});
  EXPECT_EQ(tier->control()->undo_bytes, 20000u);
  ASSERT_TRUE(tier->ReserveUndo(5000).ok());
  EXPECT_EQ(tier->undo().size(), 20000u);
}

TEST_F(HostTierTest, WhatDoesNotFitLeavesNothing) {
  const Layout huge = LayoutOf({false}, int64_t{1} << 45);
  const auto tier = HostTier::Create(directory_, huge, kNoSums, "");
  EXPECT_FALSE(tier.ok());
  EXPECT_TRUE(fs::is_empty(directory_));
}

}  // namespace
}  // namespace optstate
