#include "storage/access_file.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "storage/disk_folder.h"

namespace optstate::storage {
namespace {

class AccessFileTest : public testing::Test {
 protected:
  AccessFileTest() {
    EXPECT_NE(::mkdtemp(root_.data()), nullptr);
    for (const std::string& folder : {memory(), disk()}) {
      EXPECT_TRUE(std::filesystem::create_directory(folder));
    }
  }
  ~AccessFileTest() override { std::filesystem::remove_all(root_); }

  std::string memory() const { return root_ + "/memory"; }
  std::string disk() const { return root_ + "/disk"; }
  static void Write(const std::string& folder, const std::string& text) {
    ASSERT_TRUE(WriteDurably(folder + kAccessFile, text).ok());
  }
  static std::optional<std::string> Read(const std::string& folder) {
    const auto text = ReadAccessText(folder);
    EXPECT_TRUE(text.ok()) << text.status();
    return text.value_or(std::nullopt);
  }
  size_t FilesOnDisk() const {
    return static_cast<size_t>(
        std::distance(std::filesystem::directory_iterator(disk()),
                      std::filesystem::directory_iterator()));
  }

 private:
  std::string root_ = ::testing::TempDir() + "/access_file-XXXXXX";
};

TEST_F(AccessFileTest, AJobForWhomNothingWasSaidHasNone) {
  EXPECT_EQ(Read(memory()), std::nullopt);
  EXPECT_FALSE(MayBePrivate(memory()));
  EXPECT_TRUE(CopyAccess(memory(), disk(), /*is_taken_over=*/false).ok());
  EXPECT_EQ(FilesOnDisk(), 0u);
}

TEST_F(AccessFileTest, TheFolderSaysWhatTheDirectorySays) {
  Write(memory(), "first");
  ASSERT_TRUE(CopyAccess(memory(), disk(), /*is_taken_over=*/false).ok());
  EXPECT_EQ(Read(disk()), "first");
  Write(memory(), "second");
  ASSERT_TRUE(CopyAccess(memory(), disk(), /*is_taken_over=*/true).ok());
  EXPECT_EQ(Read(disk()), "second");
  EXPECT_EQ(FilesOnDisk(), 1u);
}

TEST_F(AccessFileTest, WhatAnotherJobHasLeftGoes) {
  Write(disk(), "of a former job");
  ASSERT_TRUE(CopyAccess(memory(), disk(), /*is_taken_over=*/false).ok());
  EXPECT_EQ(Read(disk()), "of a former job");
  ASSERT_TRUE(CopyAccess(memory(), disk(), /*is_taken_over=*/true).ok());
  EXPECT_EQ(Read(disk()), std::nullopt);
}

TEST_F(AccessFileTest, AFolderThatIsNotThereIsAnError) {
  Write(memory(), "text");
  EXPECT_FALSE(CopyAccess(memory(), disk() + "/none", true).ok());
}

// Only a text that says so plainly lets a job be named.
TEST_F(AccessFileTest, WhatIsNotPlainlyOpenMayBePrivate) {
  Write(memory(), "access 1 open\ngroup g\n");
  EXPECT_FALSE(MayBePrivate(memory()));
  for (const std::string text :
       {"access 1 private\n", "access 2 open\n", "access 1 openly\n", ""}) {
    Write(memory(), text);
    EXPECT_TRUE(MayBePrivate(memory())) << text;
  }
  std::filesystem::remove(memory() + kAccessFile);
  std::filesystem::create_directory(memory() + kAccessFile);
  EXPECT_TRUE(MayBePrivate(memory()));
}

}  // namespace
}  // namespace optstate::storage
