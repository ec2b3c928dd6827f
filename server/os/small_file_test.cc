#include "server/os/small_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>

#include "absl/status/status.h"
#include "server/os/file_lock.h"

namespace optstate::os {
namespace {

using ::testing::HasSubstr;

// No file can be opened while there is one.
class NoMoreFiles {
 public:
  NoMoreFiles() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const struct rlimit none = {0, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoMoreFiles() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }

 private:
  struct rlimit before_ = {};
};

TEST(SmallFileTest, WhatIsCreatedIsRead) {
  const std::string path = testing::TempDir() + "/small";
  ASSERT_EQ(CreateSmallFile(path, "seven"), absl::OkStatus());
  EXPECT_TRUE(absl::IsAlreadyExists(CreateSmallFile(path, "again")));
  const auto text = ReadSmallFile(path, 5);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(*text, "seven");
  EXPECT_TRUE(absl::IsResourceExhausted(ReadSmallFile(path, 4).status()));
  ::unlink(path.c_str());
  EXPECT_TRUE(absl::IsNotFound(ReadSmallFile(path, 5).status()));
}

TEST(SmallFileTest, ErrorsOfFilesSayWhatToDo) {
  const std::string path = testing::TempDir() + "/not_opened";
  absl::Status read;
  absl::Status created;
  absl::Status locked;
  {
    const NoMoreFiles none;
    read = ReadSmallFile(path, 5).status();
    created = CreateSmallFile(path, "text");
    locked = FileLock::Take(path, "the directory").status();
  }
  for (const absl::Status& status : {read, created, locked}) {
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr(path));
    EXPECT_THAT(status.message(), HasSubstr("LimitNOFILE="));
  }
}

}  // namespace
}  // namespace optstate::os
