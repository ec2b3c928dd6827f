#include "server/supervisor/job_access_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/os/private_directory.h"
#include "storage/access_file.h"
#include "storage/format/sealed_text.h"

namespace optstate::supervisor {
namespace {

using ::testing::HasSubstr;

v1::JobAccess Full() {
  v1::JobAccess access;
  access.set_group("domain users");
  access.set_is_private(true);
  access.add_readers("alice");
  access.add_readers("@ops");
  return access;
}

TEST(JobAccessFormatTest, WhatIsWrittenIsRead) {
  v1::JobAccess open;
  open.set_group("research");
  v1::JobAccess alone;
  alone.set_is_private(true);
  for (const v1::JobAccess& access : {v1::JobAccess(), open, alone, Full()}) {
    const auto read = ParseAccess(FormatAccess(access));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->SerializeAsString(), access.SerializeAsString());
  }
}

TEST(JobAccessFormatTest, TheTextIsForPeopleToo) {
  EXPECT_THAT(FormatAccess(Full()),
              testing::StartsWith("access 1 private\ngroup domain users\n"
                                  "reader alice\nreader @ops\n"));
}

// No byte can be lost or changed without being noticed.
TEST(JobAccessFormatTest, DamageIsNoticed) {
  const std::string text = FormatAccess(Full());
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(ParseAccess(text.substr(0, size)).status()))
        << size;
  }
  for (size_t i = 0; i < text.size(); ++i) {
    std::string damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_FALSE(ParseAccess(damaged).ok()) << i;
  }
}

TEST(JobAccessFormatTest, WhatALaterBuildSaysIsNotGuessed) {
  for (const std::string text :
       {"access 2 open\n", "access 1 open\nwriter alice\n",
        "access 1 open\ngroup a\ngroup b\n", "access 1 open\nreader alice\n",
        "access 1 private\nreader a:b\n", "open\n"}) {
    EXPECT_TRUE(absl::IsDataLoss(ParseAccess(storage::SealText(text)).status()))
        << text;
  }
}

class JobAccessFileTest : public testing::Test {
 protected:
  JobAccessFileTest() { EXPECT_NE(::mkdtemp(folder_.data()), nullptr); }
  ~JobAccessFileTest() override { EXPECT_TRUE(os::RemoveTree(folder_).ok()); }

  std::string folder_ = ::testing::TempDir() + "/job_access-XXXXXX";
};

TEST_F(JobAccessFileTest, NoFileIsTheDefault) {
  const KnownAccess known = ReadAccess(folder_);
  EXPECT_EQ(known.problem, "");
  EXPECT_EQ(known.access.ByteSizeLong(), 0u);
}

TEST_F(JobAccessFileTest, WhatIsWrittenIsRead) {
  ASSERT_TRUE(WriteAccess(folder_, Full()).ok());
  const KnownAccess known = ReadAccess(folder_);
  EXPECT_EQ(known.problem, "");
  EXPECT_EQ(known.access.SerializeAsString(), Full().SerializeAsString());
}

// A file that cannot be used shows the job to nobody else.
TEST_F(JobAccessFileTest, ADamagedFileMeansPrivateToTheOwner) {
  const std::string path = folder_ + storage::kAccessFile;
  const auto expect_private = [&] {
    const KnownAccess known = ReadAccess(folder_);
    EXPECT_TRUE(known.access.is_private());
    EXPECT_EQ(known.access.group(), "");
    EXPECT_EQ(known.access.readers_size(), 0);
    EXPECT_THAT(known.problem, HasSubstr(path));
    EXPECT_THAT(known.problem, HasSubstr("optctl set job"));
  };
  std::ofstream(path) << "access 1 open\n";
  expect_private();
  std::ofstream(path) << "";
  expect_private();
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  expect_private();
}

}  // namespace
}  // namespace optstate::supervisor
