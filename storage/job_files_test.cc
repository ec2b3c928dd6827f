#include "storage/job_files.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/partition.h"

namespace optstate::storage {
namespace {

namespace fs = std::filesystem;
using StepFile = JobFiles::StepFile;

constexpr uint64_t kIncarnation = 77;
constexpr Accumulation kNoSums;
constexpr Accumulation kSums = AccumulateDType::kFloat32;
const std::vector<std::pair<StepFile, std::string>> kFiles = {
    {StepFile::kSpeculation, "speculation"},
    {StepFile::kUndo, "undo"},
    {StepFile::kFrames, "frames"},
    {StepFile::kFrameTable, "frame_table"},
    {StepFile::kRedo, "redo"}};

Layout LayoutOf(int64_t parameters) {
  LayoutSpec spec;
  spec.groups.resize(1);
  for (int64_t i = 0; i < parameters; ++i) {
    ParameterSpec parameter;
    parameter.name = "p" + std::to_string(i);
    parameter.shape = {5000};
    parameter.numel = 5000;
    spec.parameters.push_back(parameter);
  }
  return *Layout::Make(std::move(spec));
}

class JobFilesTest : public ::testing::Test {
 protected:
  JobFilesTest() {
    std::string name = ::testing::TempDir() + "/job_files-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~JobFilesTest() override { fs::remove_all(folder_); }

  absl::StatusOr<JobFiles> Create(Accumulation accumulation = kNoSums) {
    return JobFiles::Create(folder_, layout_, accumulation, kIncarnation);
  }
  absl::StatusOr<JobFiles> Open(Accumulation accumulation = kNoSums) {
    return JobFiles::Open(folder_, layout_, accumulation, kIncarnation);
  }
  bool Exists(const std::string& file) const {
    return fs::exists(folder_ + "/" + file);
  }

  const Layout layout_ = LayoutOf(2);
  std::string folder_;
};

TEST_F(JobFilesTest, WhatRecoveryNeedsIsThereAfterReopening) {
  {
    auto files = Create(kSums);
    ASSERT_TRUE(files.ok()) << files.status();
    EXPECT_EQ(files->bytes(), JobFiles::BytesNeeded(layout_, kSums));
    const RecoveryArrays arrays = files->recovery();
    arrays.run_stamps[layout_.run_count() - 1] = 3;
    arrays.staged_marks[layout_.run_count() - 1] = 4;
    arrays.rank_marks[kWorldSizeMax - 1].step = 5;
    arrays.step_intent.back() = std::byte{6};
    EXPECT_EQ(CurrentRecord(*files->control()).load_touched_from, kNoParameter);
  }
  auto files = Open(kSums);
  ASSERT_TRUE(files.ok()) << files.status();
  const RecoveryArrays arrays = files->recovery();
  EXPECT_EQ(arrays.run_stamps[layout_.run_count() - 1], 3u);
  EXPECT_EQ(arrays.staged_marks[layout_.run_count() - 1], 4u);
  EXPECT_EQ(arrays.rank_marks[kWorldSizeMax - 1].step, 5u);
  EXPECT_EQ(arrays.step_intent.back(), std::byte{6});
  EXPECT_EQ(files->control()->incarnation, kIncarnation);
}

TEST_F(JobFilesTest, MarksOfSumsExistWithSums) {
  ASSERT_TRUE(Create(kNoSums).ok());
  EXPECT_EQ(Open(kNoSums)->recovery().staged_marks, nullptr);
  EXPECT_FALSE(Exists("staged_marks.u64"));
}

TEST_F(JobFilesTest, FilesOfAnotherJobAreRefused) {
  ASSERT_TRUE(Create().ok());
  EXPECT_TRUE(absl::IsDataLoss(
      JobFiles::Open(folder_, layout_, kNoSums, kIncarnation + 1).status()));
  // A longer layout needs more stamps than the file has.
  const auto longer =
      JobFiles::Open(folder_, LayoutOf(2000), kNoSums, kIncarnation);
  EXPECT_TRUE(absl::IsDataLoss(longer.status())) << longer.status();
  for (const char* name : {"run_stamps.u64", "control"}) {
    fs::remove(folder_ + "/" + name);
    const absl::Status missing = Open().status();
    EXPECT_TRUE(absl::IsDataLoss(missing)) << missing;
    EXPECT_NE(missing.message().find(name), std::string::npos) << missing;
  }
}

TEST_F(JobFilesTest, TheDescriptionIsReplacedAsAWhole) {
  const auto files = Create();
  ASSERT_TRUE(files.ok());
  EXPECT_TRUE(absl::IsDataLoss(JobFiles::ReadDescription(folder_).status()));
  EXPECT_TRUE(
      absl::IsNotFound(JobFiles::ReadDescription(folder_ + "/no").status()));
  for (const char* text : {"first", "second"}) {
    ASSERT_TRUE(files->WriteDescription(layout_, text).ok());
    const auto found = JobFiles::ReadDescription(folder_);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->payload, text);
    EXPECT_EQ(found->layout_hash, layout_.hash());
    EXPECT_EQ(found->incarnation, kIncarnation);
  }
}

TEST_F(JobFilesTest, AStepFileIsKeptUntilItIsUsed) {
  for (const auto& [which, name] : kFiles) {
    fs::remove_all(folder_);
    fs::create_directory(folder_);
    {
      auto files = Create();
      ASSERT_TRUE(files.ok());
      ASSERT_TRUE(files->Reserve(which, 0).ok());
      EXPECT_TRUE(files->step_file(which).empty());
      EXPECT_FALSE(Exists(name));
      ASSERT_TRUE(files->Reserve(which, 10000).ok());
      files->step_file(which)[9999] = std::byte{7};
      EXPECT_EQ(files->bytes(),
                JobFiles::BytesNeeded(layout_, kNoSums) + 10000);
    }
    auto files = Open();
    ASSERT_TRUE(files.ok());
    EXPECT_TRUE(files->step_file(which).empty());
    ASSERT_TRUE(files->Reserve(which, 0).ok());
    ASSERT_EQ(files->step_file(which).size(), 10000u);
    ASSERT_TRUE(files->Reserve(which, 20000).ok());
    ASSERT_TRUE(files->Reserve(which, 5000).ok());
    ASSERT_EQ(files->step_file(which).size(), 20000u);
    EXPECT_EQ(files->step_file(which)[9999], std::byte{7});
    EXPECT_EQ(files->step_file(which)[19999], std::byte{0});
    std::vector<ArrayInfo> infos;
    files->DescribeStepFiles(&infos);
    ASSERT_EQ(infos.size(), 1u);
    EXPECT_EQ(infos[0].file, name);
    EXPECT_EQ(infos[0].bytes, 20000u);
    EXPECT_EQ(files->control()->undo_bytes,
              which == StepFile::kUndo ? 20000u : 0u);
  }
}

// An empty file is what a creation that a crash interrupted has left.
TEST_F(JobFilesTest, AnEmptyStepFileIsMadeAnew) {
  auto files = Create();
  ASSERT_TRUE(files.ok());
  std::ofstream(folder_ + "/redo").close();
  ASSERT_TRUE(files->Reserve(StepFile::kRedo, 4096).ok());
  EXPECT_EQ(files->step_file(StepFile::kRedo).size(), 4096u);
}

TEST_F(JobFilesTest, ReservingTooMuchKeepsWhatIsThere) {
  auto files = Create();
  ASSERT_TRUE(files.ok());
  ASSERT_TRUE(files->Reserve(StepFile::kUndo, 10000).ok());
  files->step_file(StepFile::kUndo)[9999] = std::byte{7};
  EXPECT_FALSE(files->Reserve(StepFile::kUndo, uint64_t{1} << 60).ok());
  ASSERT_EQ(files->step_file(StepFile::kUndo).size(), 10000u);
  EXPECT_EQ(files->step_file(StepFile::kUndo)[9999], std::byte{7});
  EXPECT_EQ(files->control()->undo_bytes, 10000u);
}

TEST_F(JobFilesTest, RestoreBringsEveryFileBack) {
  const Layout longer = LayoutOf(2000);
  auto files = Create();
  ASSERT_TRUE(files.ok());
  StepFileBytes first;
  first.undo = 10000;
  first.frames = 20000;
  ASSERT_TRUE(files->Reserve(first).ok());
  files->recovery().run_stamps[1] = 9;
  files->step_file(StepFile::kFrames)[19999] = std::byte{7};
  const uint64_t bytes = files->bytes();
  const JobFiles::Extents before = files->extents();
  StepFileBytes more = {.undo = 30000,
                        .redo = 40000,
                        .speculation = 50000,
                        .frames = 60000,
                        .frame_table = 70000};
  ASSERT_TRUE(files->Resize(longer, kSums, more).ok());
  EXPECT_GT(files->bytes(), bytes + 40000);
  EXPECT_NE(files->recovery().staged_marks, nullptr);
  ASSERT_TRUE(files->Restore(before, longer).ok());
  EXPECT_EQ(files->bytes(), bytes);
  EXPECT_EQ(files->recovery().run_stamps[1], 9u);
  EXPECT_EQ(files->recovery().staged_marks, nullptr);
  EXPECT_EQ(files->control()->undo_bytes, 10000u);
  EXPECT_EQ(fs::file_size(folder_ + "/undo"), 10000u);
  ASSERT_EQ(files->step_file(StepFile::kFrames).size(), 20000u);
  EXPECT_EQ(files->step_file(StepFile::kFrames)[19999], std::byte{7});
  for (const char* name :
       {"redo", "speculation", "frame_table", "staged_marks.u64"}) {
    EXPECT_FALSE(Exists(name)) << name;
  }
  EXPECT_TRUE(Open().ok());
}

TEST_F(JobFilesTest, MarksOfSumsGoWithTheSums) {
  auto files = Create(kSums);
  ASSERT_TRUE(files.ok());
  ASSERT_TRUE(files->Resize(layout_, kNoSums, {}).ok());
  EXPECT_TRUE(Exists("staged_marks.u64"));
  files->RemoveUnwanted(layout_, kNoSums);
  EXPECT_FALSE(Exists("staged_marks.u64"));
  EXPECT_EQ(files->recovery().staged_marks, nullptr);
}

TEST_F(JobFilesTest, TheLoadLogGrowsInPlaceAndGoes) {
  auto files = Create();
  ASSERT_TRUE(files.ok());
  EXPECT_TRUE(files->load_log().empty());
  ASSERT_TRUE(files->ReserveLoadLog(4096, 1 << 20).ok());
  std::byte* const where = files->load_log().data();
  files->load_log()[4095] = std::byte{3};
  ASSERT_TRUE(files->ReserveLoadLog(8192, 1 << 20).ok());
  EXPECT_EQ(files->load_log().data(), where);
  EXPECT_EQ(files->load_log().size(), 8192u);
  {
    auto next = Open();
    ASSERT_TRUE(next.ok());
    EXPECT_TRUE(absl::IsDataLoss(next->OpenLoadLog(uint64_t{1} << 21)));
    ASSERT_TRUE(next->OpenLoadLog(8192).ok());
    EXPECT_EQ(next->load_log()[4095], std::byte{3});
  }
  files->DropLoadLog();
  EXPECT_TRUE(files->load_log().empty());
  EXPECT_FALSE(Exists("load"));
  // A file that an engine left is not taken for a new one.
  std::ofstream(folder_ + "/load") << "left";
  ASSERT_TRUE(files->ReserveLoadLog(4096, 4096).ok());
  EXPECT_EQ(files->load_log()[0], std::byte{0});
}

}  // namespace
}  // namespace optstate::storage
