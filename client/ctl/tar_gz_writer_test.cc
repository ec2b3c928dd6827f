// Archives are read by the system's tar.

#include "client/ctl/tar_gz_writer.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

class TarGzWriterTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/tar_gz-XXXXXX";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    auto writer = TarGzWriter::Make(
        UniqueFd(
            ::open(Archive().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600)),
        absl::FromUnixSeconds(1'700'000'000));
    ASSERT_TRUE(writer.ok()) << writer.status();
    writer_ = *std::move(writer);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Archive() const { return folder_ + "/archive.tar.gz"; }

  static int Run(const std::string& command) {
    return ::system(command.c_str());
  }
  int Extract() const {
    return Run(absl::StrCat("tar -C ", folder_, " -xzf ", Archive()));
  }
  std::string Content(const std::string& name) const {
    std::ifstream file(absl::StrCat(folder_, "/", name), std::ios::binary);
    EXPECT_TRUE(file) << name;
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  std::string folder_;
  std::unique_ptr<TarGzWriter> writer_;
};

TEST_F(TarGzWriterTest, TarReadsWhatWasAdded) {
  if (Run("tar --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no tar here";
  const std::string long_name(100, 'n');
  std::string large;
  for (int i = 0; i < 300'000; ++i) absl::StrAppend(&large, i, "\n");
  const std::string block(512, 'b');
  const std::string bytes("\0\xff\n\r", 4);
  const std::pair<std::string, std::string> files[] = {
      {"report/empty", ""},     {"report/text", "a text\n"},
      {"report/block", block},  {"report/more", block + "x"},
      {"report/bytes", bytes},  {"report/large", large},
      {long_name, "long name"},
  };
  for (const auto& [name, content] : files) {
    const absl::Status added = writer_->Add(name, content);
    ASSERT_TRUE(added.ok()) << added;
  }
  const absl::Status finished = writer_->Finish();
  ASSERT_TRUE(finished.ok()) << finished;
  ASSERT_EQ(Extract(), 0);
  for (const auto& [name, content] : files) {
    EXPECT_EQ(Content(name), content) << name;
  }
  EXPECT_EQ(std::filesystem::status(folder_ + "/report/text").permissions(),
            std::filesystem::perms(0600));
  EXPECT_EQ(Run(absl::StrCat("tar -tvzf ", Archive(),
                             " --utc | grep -q '2023-11-14 22:13'")),
            0);
}

TEST_F(TarGzWriterTest, AnArchiveOfNothing) {
  if (Run("tar --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no tar here";
  ASSERT_TRUE(writer_->Finish().ok());
  EXPECT_EQ(Run(absl::StrCat("test -z \"$(tar -tzf ", Archive(), ")\"")), 0);
}

TEST_F(TarGzWriterTest, NamesThatAreNone) {
  for (const std::string& name :
       {std::string(), std::string("/etc/passwd"), std::string("../x"),
        std::string("a/../../x"), std::string("folder/"),
        std::string(101, 'n')}) {
    EXPECT_TRUE(absl::IsInvalidArgument(writer_->Add(name, ""))) << name;
  }
}

TEST(TarGzWriterErrorTest, AFullDiskIsSaid) {
  UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  if (!full.ok()) GTEST_SKIP() << "no /dev/full here";
  auto writer = TarGzWriter::Make(std::move(full), absl::UnixEpoch());
  ASSERT_TRUE(writer.ok()) << writer.status();
  absl::Status status = (*writer)->Add("x", "content");
  status.Update((*writer)->Finish());
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
}

}  // namespace
}  // namespace optstate::ctl
