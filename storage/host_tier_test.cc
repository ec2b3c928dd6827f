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
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace optstate::storage {
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
    // This parameter's masters are an array.
    parameter.dtype = DType::kBFloat16;
    spec.parameters.push_back(parameter);
  }
  return *Layout::Make(std::move(spec));
}

constexpr Accumulation kNoSums;
constexpr Accumulation kSums = AccumulateDType::kFloat32;

// A job's floats by flat element, through its records.
class Floats {
 public:
  Floats(const HostTier& tier, const Layout& layout)
      : store_(tier.MakeStore(&layout, 0)) {}

  float& Master(uint64_t flat) const { return At(kMasterPart, flat); }
  float& State(int k, uint64_t flat) const { return At(kStatePart0 + k, flat); }
  bool HasPart(int part) const { return !store_->record(0).part(part).empty(); }
  bool HasSums() const { return store_->accumulates(); }
  float& Sum(uint32_t parameter, uint64_t element) const {
    return *reinterpret_cast<float*>(store_->sums(parameter, element));
  }
  int64_t& StepCount(uint32_t parameter) const {
    return store_->step_counts()[parameter];
  }

 private:
  float& At(int part, uint64_t flat) const {
    for (size_t i = 0;; ++i) {
      const RecordView record = store_->record(i);
      if (flat >= record.sub_group().end) continue;
      const uint64_t at = (flat - record.sub_group().begin) * sizeof(float);
      return *reinterpret_cast<float*>(&record.part(part)[at]);
    }
  }

  std::unique_ptr<HostStore> store_;
};

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
    const Floats floats(*tier, layout);
    floats.Master(0) = 1;
    floats.State(0, layout.flat_elements() - 1) = 2;
    floats.State(2, layout.flat_elements() - 1) = 3;
    floats.Sum(0, 5) = 4;
    floats.StepCount(1) = 5;
    EXPECT_EQ(floats.State(1, 0), 0);
  }
  const auto description = HostTier::ReadDescription(directory_);
  ASSERT_TRUE(description.ok());
  EXPECT_EQ(description->payload, "description");
  auto tier = OpenWith(layout, kSums);
  ASSERT_TRUE(tier.ok()) << tier.status();
  const Floats floats(*tier, layout);
  EXPECT_EQ(floats.Master(0), 1);
  EXPECT_EQ(floats.State(0, layout.flat_elements() - 1), 2);
  EXPECT_EQ(floats.State(2, layout.flat_elements() - 1), 3);
  EXPECT_EQ(floats.Sum(0, 5), 4);
  EXPECT_EQ(floats.StepCount(1), 5);
}

// The arrays follow proto/shm/spread_mapping.h: none begins at the same place
// of 256 MiB.
TEST_F(HostTierTest, LargeArraysAreSpread) {
  const Layout layout = LayoutOf({false}, 600000);
  auto tier = HostTier::Create(directory_, layout, kSums, "");
  ASSERT_TRUE(tier.ok()) << tier.status();
  const Floats floats(*tier, layout);
  std::set<uint64_t> places;
  for (const float* data : {&floats.Master(0), &floats.State(0, 0),
                            &floats.State(1, 0), &floats.Sum(0, 0)}) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    EXPECT_EQ(address % (2 << 20), 0);
    places.insert(address % (256 << 20));
  }
  EXPECT_EQ(places.size(), 4);
}

// The file is what a creation that a crash interrupted has left, where it
// cannot be removed.
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
  const Layout layout = LayoutOf({false});
  auto tier = HostTier::Create(directory_, layout, kNoSums, "");
  ASSERT_TRUE(tier.ok());
  EXPECT_FALSE(Floats(*tier, layout).HasPart(kStatePart0 + 2));
  EXPECT_FALSE(Floats(*tier, layout).HasSums());
  EXPECT_EQ(tier->recovery().staged_marks, nullptr);
  EXPECT_EQ(tier->Describe(LayoutOf({false})).size(), 8u);
  EXPECT_EQ(FileCount(), 10u);  // and control, job.binpb
}

// With Adafactor only what parameters have takes memory, and what there is one
// of a row or a column is float32 in every format.
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
  EXPECT_FALSE(Floats(*tier, layout).HasPart(kScalePart0));
}

TEST_F(HostTierTest, ReshapeKeepsOffsetsAndAddsArrays) {
  const Layout small = LayoutOf({false});
  const Layout large = LayoutOf({false, true, false});
  auto tier = HostTier::Create(directory_, small, kNoSums, "small");
  ASSERT_TRUE(tier.ok());
  for (uint64_t i = 0; i < small.flat_elements(); ++i) {
    Floats(*tier, small).Master(i) = static_cast<float>(i);
  }
  ASSERT_TRUE(tier->Reshape(large, kSums, {}, "large").ok());
  EXPECT_EQ(tier->bytes(), HostTier::BytesNeeded(large, kSums));
  const Floats grown(*tier, large);
  for (uint64_t i = 0; i < large.flat_elements(); ++i) {
    ASSERT_EQ(grown.Master(i),
              i < small.flat_elements() ? static_cast<float>(i) : 0.0f);
  }
  grown.State(2, large.group_begin(1)) = 1;
  grown.Sum(2, 4999) = 1;
  ASSERT_TRUE(tier->Reshape(large, kNoSums, {}, "without").ok());
  EXPECT_FALSE(Floats(*tier, large).HasSums());
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
  Floats(*tier, small).Master(7) = 7;
  // The description cannot be replaced: its temporary name is taken.
  fs::create_directory(directory_ + "/state/job.binpb.tmp");
  EXPECT_FALSE(tier->Reshape(large, kSums, {}, "large").ok());
  EXPECT_EQ(tier->bytes(), HostTier::BytesNeeded(small, kNoSums));
  EXPECT_EQ(Floats(*tier, small).Master(7), 7);
  EXPECT_FALSE(Floats(*tier, small).HasSums());
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

// The file grows with the workers, and what a former engine left in it stays.
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
}  // namespace optstate::storage
