#include "client/ctl/bug_report.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

TEST(BugReportTest, TheConfigurationFileOfACommandLine) {
  const auto line = [](std::string text) {
    for (char& c : text) {
      if (c == ' ') c = '\0';
    }
    return text;
  };
  EXPECT_EQ(ConfigFileIn(line("optstated --config /etc/o.yaml --tcp x")),
            "/etc/o.yaml");
  EXPECT_EQ(ConfigFileIn(line("optstated --config=o.yaml ")), "o.yaml");
  EXPECT_EQ(ConfigFileIn(line("optstated --check-config ")), "");
  EXPECT_EQ(ConfigFileIn(line("--config x")), "");
  EXPECT_EQ(ConfigFileIn(""), "");
}

TEST(BugReportTest, SmallFilesAreBounded) {
  EXPECT_EQ(ReadSmallFile("/dev/zero", 1000)->size(), 1000u);
  EXPECT_TRUE(absl::IsNotFound(ReadSmallFile("/nonexistent", 1).status()));
  EXPECT_FALSE(ReadSmallFile("/", 1).ok());
}

class BugReportArchiveTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/bug_report-XXXXXX";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
    auto archive = TarGzWriter::Make(
        UniqueFd(::open((folder_ + "/a.tar.gz").c_str(),
                        O_WRONLY | O_CREAT | O_CLOEXEC, 0600)),
        absl::UnixEpoch());
    ASSERT_TRUE(archive.ok()) << archive.status();
    archive_ = *std::move(archive);
    report_ = std::make_unique<BugReport>(archive_.get());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  bool Extract() const {
    return ::system(
               absl::StrCat("tar -C ", folder_, " -xzf ", folder_, "/a.tar.gz")
                   .c_str()) == 0;
  }
  std::string Content(const std::string& name) const {
    std::ifstream file(absl::StrCat(folder_, "/", BugReport::kFolder, name));
    EXPECT_TRUE(file) << name;
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  std::string folder_;
  std::unique_ptr<TarGzWriter> archive_;
  std::unique_ptr<BugReport> report_;
};

TEST_F(BugReportArchiveTest, TheListSaysWhatIsThereAndWhatIsNot) {
  report_->Add("text", std::string("content"));
  report_->Add("absent", absl::PermissionDeniedError("not for this user"));
  report_->Add("large", std::string(BugReport::kFileBytesMax + 1, 'x'));
  // The part that is kept counts.
  EXPECT_EQ(report_->bytes(), 7 + BugReport::kFileBytesMax);
  report_->AddMachineFile("machine/", "/proc/version");
  report_->AddMachineFile("machine/", "/nonexistent/file");
  const auto list = report_->Finish();
  ASSERT_TRUE(list.ok()) << list.status();
  for (const char* text :
       {"  text\n", "  large (cut)\n", "  machine/version\n",
        "  absent: not for this user\n", "  machine/file: open /nonexistent"}) {
    EXPECT_TRUE(absl::StrContains(*list, text)) << *list;
  }
  ASSERT_TRUE(Extract());
  EXPECT_EQ(Content("contents.txt"), *list);
  EXPECT_EQ(Content("text"), "content");
  EXPECT_EQ(Content("large").size(), BugReport::kFileBytesMax);
}

TEST_F(BugReportArchiveTest, NothingOfTheEnvironmentIsInIt) {
  const auto environment = ReadSmallFile("/proc/self/environ", 1 << 20);
  ASSERT_TRUE(environment.ok()) << environment.status();
  if (!absl::StrContains(*environment, "PATH=")) {
    GTEST_SKIP() << "this process was started without a PATH";
  }
  AddMachine(report_.get());
  AddDaemonProcess(::getpid(), report_.get());
  AddEngineProcess(::getpid(), report_.get());
  ASSERT_TRUE(report_->Finish().ok());
  ASSERT_TRUE(Extract());
  EXPECT_TRUE(absl::StrContains(Content("daemon/limits"), "Max open files"));
  EXPECT_TRUE(
      absl::StrContains(Content("machine/cpuinfo_first"), "processors online"));
  EXPECT_NE(
      ::system(absl::StrCat("grep -ra PATH= ", folder_, "/optstate-bugreport")
                   .c_str()),
      0);
}

}  // namespace
}  // namespace optstate::ctl
