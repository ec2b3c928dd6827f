#include "storage/host_arrays.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>
#include <utility>

#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

namespace fs = std::filesystem;

constexpr Accumulation kNoSums;
constexpr Accumulation kSums = AccumulateDType::kFloat32;

// One bfloat16 parameter a group, so that masters are an array of their own.
Layout LayoutOf(uint32_t groups, StateFormat format = StateFormat::kFloat32) {
  LayoutSpec spec;
  spec.state_format = format;
  for (uint32_t group = 0; group < groups; ++group) {
    spec.groups.emplace_back();
    ParameterSpec parameter;
    parameter.name = "p" + std::to_string(group);
    parameter.shape = {5000};
    parameter.numel = 5000;
    parameter.group = group;
    parameter.dtype = DType::kBFloat16;
    spec.parameters.push_back(parameter);
  }
  return *Layout::Make(std::move(spec));
}

class HostArraysTest : public ::testing::Test {
 protected:
  HostArraysTest() {
    std::string name = ::testing::TempDir() + "/host_arrays-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~HostArraysTest() override { fs::remove_all(folder_); }

  bool Exists(const std::string& file) const {
    return fs::exists(folder_ + "/" + file);
  }
  size_t FileCount() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_),
                                             fs::directory_iterator()));
  }

  std::string folder_;
};

TEST_F(HostArraysTest, WhatIsWrittenIsThereAfterReopening) {
  const Layout layout = LayoutOf(2, StateFormat::kDynamic8);
  const uint64_t last = layout.flat_elements() - 1;
  {
    HostArrayFiles files(folder_);
    ASSERT_TRUE(files.Create(layout, kSums).ok());
    EXPECT_EQ(files.bytes(), HostArrayFiles::BytesNeeded(layout, kSums));
    const StateArrays arrays = files.addresses();
    arrays.parameters[9999] = std::byte{1};
    reinterpret_cast<float*>(arrays.master)[last] = 2;
    arrays.state[0][last] = std::byte{3};
    arrays.scale[1][last / 256] = 4;
    arrays.accumulator[last] = 5;
    arrays.step_counts[1] = 6;
    EXPECT_EQ(arrays.state[2], nullptr);
    EXPECT_EQ(arrays.scalars, nullptr);
    EXPECT_EQ(arrays.gradient_accumulator, nullptr);
  }
  HostArrayFiles files(folder_);
  ASSERT_TRUE(files.Open(layout, kSums).ok());
  const StateArrays arrays = files.addresses();
  EXPECT_EQ(arrays.parameters[9999], std::byte{1});
  EXPECT_EQ(reinterpret_cast<float*>(arrays.master)[last], 2);
  EXPECT_EQ(arrays.state[0][last], std::byte{3});
  EXPECT_EQ(arrays.scale[1][last / 256], 4);
  EXPECT_EQ(arrays.accumulator[last], 5);
  EXPECT_EQ(arrays.step_counts[1], 6);
  const auto info = files.Describe(kScale0Array, layout);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->file, "exp_avg.scale.f32");
}

TEST_F(HostArraysTest, RecordsThatAreSwappedHaveNoArrays) {
  const Layout layout = LayoutOf(1);
  HostArrayFiles files(folder_);
  ASSERT_TRUE(files.Create(layout, {kNoSums, /*has=*/false}).ok());
  const StateArrays arrays = files.addresses();
  EXPECT_NE(arrays.parameters, nullptr);
  EXPECT_NE(arrays.step_counts, nullptr);
  EXPECT_EQ(arrays.master, nullptr);
  EXPECT_EQ(arrays.state[0], nullptr);
  EXPECT_EQ(FileCount(), 2u);
}

TEST_F(HostArraysTest, ParametersAreHandedOutForReadingAlone) {
  const Layout layout = LayoutOf(1);
  HostArrayFiles files(folder_);
  ASSERT_TRUE(files.Create(layout, kNoSums).ok());
  files.addresses().parameters[5] = std::byte{9};
  const auto fd = files.OpenParameters();
  ASSERT_TRUE(fd.ok()) << fd.status();
  char byte = 0;
  EXPECT_EQ(::pread(fd->get(), &byte, 1, 5), 1);
  EXPECT_EQ(byte, 9);
  EXPECT_EQ(::pwrite(fd->get(), &byte, 1, 5), -1);
}

TEST_F(HostArraysTest, ResizeKeepsWhatIsThereAndRestoreCutsBack) {
  const Layout small = LayoutOf(1);
  const Layout large = LayoutOf(3);
  HostArrayFiles files(folder_);
  ASSERT_TRUE(files.Create(small, kNoSums).ok());
  const size_t count = FileCount();
  const uint64_t bytes = files.bytes();
  reinterpret_cast<float*>(files.addresses().master)[4999] = 7;
  const ArrayFiles::Extents before = files.extents();
  ASSERT_TRUE(files.Resize(large, kSums).ok());
  EXPECT_EQ(files.bytes(), HostArrayFiles::BytesNeeded(large, kSums));
  EXPECT_EQ(reinterpret_cast<float*>(files.addresses().master)[4999], 7);
  EXPECT_NE(files.addresses().accumulator, nullptr);
  files.Restore(before, large);
  EXPECT_EQ(files.bytes(), bytes);
  EXPECT_EQ(files.addresses().accumulator, nullptr);
  EXPECT_EQ(reinterpret_cast<float*>(files.addresses().master)[4999], 7);
  EXPECT_EQ(FileCount(), count);
  HostArrayFiles again(folder_);
  EXPECT_TRUE(again.Open(small, kNoSums).ok());
}

TEST_F(HostArraysTest, WhatIsNotWantedGoes) {
  const Layout layout = LayoutOf(1);
  HostArrayFiles files(folder_);
  ASSERT_TRUE(files.Create(layout, kSums).ok());
  ASSERT_TRUE(Exists("accumulator.f32"));
  files.RemoveUnwanted(layout, kNoSums);
  EXPECT_FALSE(Exists("accumulator.f32"));
  EXPECT_EQ(files.addresses().accumulator, nullptr);
  // A file that a reshape left, and not files of other owners.
  ASSERT_TRUE(files.Resize(layout, kSums).ok());
  fs::copy_file(folder_ + "/accumulator.f32", folder_ + "/run_stamps.u64");
  HostArrayFiles again(folder_);
  ASSERT_TRUE(again.Open(layout, kNoSums).ok());
  EXPECT_FALSE(Exists("accumulator.f32"));
  EXPECT_TRUE(Exists("run_stamps.u64"));
}

TEST_F(HostArraysTest, AMissingOrShortFileIsNamed) {
  const Layout layout = LayoutOf(1);
  {
    HostArrayFiles files(folder_);
    ASSERT_TRUE(files.Create(layout, kNoSums).ok());
  }
  fs::resize_file(folder_ + "/exp_avg.f32", 4096);
  absl::Status status = HostArrayFiles(folder_).Open(layout, kNoSums);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_NE(status.message().find("exp_avg.f32"), std::string::npos) << status;
  fs::remove(folder_ + "/exp_avg.f32");
  status = HostArrayFiles(folder_).Open(layout, kNoSums);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_NE(status.message().find("exp_avg.f32"), std::string::npos) << status;
}

}  // namespace
}  // namespace optstate::storage
