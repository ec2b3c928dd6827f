#include "storage/format/checked_file.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

class CheckedFileTest : public ::testing::Test {
 protected:
  ~CheckedFileTest() override { std::filesystem::remove(path_); }

  const std::string path_ =
      ::testing::TempDir() + "/checked_file." + std::to_string(::getpid());
  const CheckedFile file_ = {std::string(32, 'h'), 42, "payload"};
};

TEST_F(CheckedFileTest, RoundTripAndReplace) {
  EXPECT_EQ(ReadCheckedFile(path_).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteCheckedFile(path_, file_).ok());
  CheckedFile longer = file_;
  longer.payload.assign(100000, 'x');
  ASSERT_TRUE(WriteCheckedFile(path_, longer).ok());
  ASSERT_TRUE(WriteCheckedFile(path_, file_).ok());
  const auto read = ReadCheckedFile(path_);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->layout_hash, file_.layout_hash);
  EXPECT_EQ(read->incarnation, file_.incarnation);
  EXPECT_EQ(read->payload, file_.payload);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".tmp"));
}

TEST_F(CheckedFileTest, EveryFlippedByteAndEveryCutIsNoticed) {
  ASSERT_TRUE(WriteCheckedFile(path_, file_).ok());
  std::ifstream in(path_, std::ios::binary);
  const std::string good((std::istreambuf_iterator<char>(in)),
                         std::istreambuf_iterator<char>());
  const auto code_of = [&](const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
    return ReadCheckedFile(path_).status().code();
  };
  for (size_t byte = 0; byte < good.size(); ++byte) {
    std::string bad = good;
    bad[byte] = static_cast<char>(bad[byte] ^ (1 << (byte % 8)));
    // The format's reserved word is covered by the checksum as well.
    EXPECT_EQ(code_of(bad), absl::StatusCode::kDataLoss) << "byte " << byte;
  }
  for (size_t bytes = 0; bytes < good.size(); ++bytes) {
    EXPECT_EQ(code_of(good.substr(0, bytes)), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(code_of(good + "x"), absl::StatusCode::kDataLoss);
  EXPECT_EQ(code_of(good), absl::StatusCode::kOk);
}

TEST_F(CheckedFileTest, WhatCannotBeWrittenLeavesTheOldFile) {
  ASSERT_TRUE(WriteCheckedFile(path_, file_).ok());
  CheckedFile bad = file_;
  bad.layout_hash = "short";
  EXPECT_EQ(WriteCheckedFile(path_, bad).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(WriteCheckedFile("/nonexistent/file", file_).ok());
  EXPECT_TRUE(ReadCheckedFile(path_).ok());
}

}  // namespace
}  // namespace optstate::storage
