#include "server/observe/logging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace optstate::observe {
namespace {

using ::testing::EndsWith;
using ::testing::MatchesRegex;
using ::testing::StartsWith;

template <typename F>
std::string Captured(F log) {
  testing::internal::CaptureStderr();
  log();
  return testing::internal::GetCapturedStderr();
}

TEST(LoggingTest, OneLineWithTimeLevelAndProcess) {
  ::unsetenv("JOURNAL_STREAM");
  const std::string text = Captured([] {
    SetUpLogging("engine a", "info");
    spdlog::warn("step {} is late", 3);
  });
  EXPECT_THAT(text, MatchesRegex("....-..-..T..:..:......Z warn  engine a"
                                 "\\[[0-9]+\\] step 3 is late\n"));
}

TEST(LoggingTest, NobodyForgesALine) {
  ::unsetenv("JOURNAL_STREAM");
  const std::string text = Captured([] {
    SetUpLogging("x", "info");
    spdlog::info("client={}", "1\n2026-01-31T12:00:00.000Z error x[1] forged");
  });
  EXPECT_THAT(text, MatchesRegex(".* client=1\\\\n2026[^\n]*forged\n"));
}

TEST(LoggingTest, Levels) {
  const std::string text = Captured([] {
    SetUpLogging("x", "error");
    spdlog::warn("no");
    SetLogLevel("trace");
    spdlog::trace("yes");
    SetLogLevel("nonsense");
    spdlog::debug("no");
  });
  EXPECT_THAT(text, testing::HasSubstr("trace x"));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("no")));
}

TEST(LoggingTest, JournalGetsPriorities) {
  const std::string text = Captured([] {
    struct stat info;
    ASSERT_EQ(::fstat(STDERR_FILENO, &info), 0);
    ::setenv("JOURNAL_STREAM",
             absl::StrCat(info.st_dev, ":", info.st_ino).c_str(), 1);
    SetUpLogging("optstated", "info");
    spdlog::error("bad");
    spdlog::info("good");
    SetUpLogging("engine a", "info");
    spdlog::info("of a job");
    ::unsetenv("JOURNAL_STREAM");
  });
  EXPECT_EQ(text, "<3>bad\n<6>good\n<6>engine a: of a job\n");
}

TEST(LoggingTest, LinesOfJson) {
  ::unsetenv("JOURNAL_STREAM");
  const std::string text = Captured([] {
    SetUpLogging("optstated", "info", LogFormat::kJson);
    EXPECT_EQ(CurrentLogFormat(), LogFormat::kJson);
    spdlog::info("job {}: created", "a");
    SetUpLogging("engine b", "info", LogFormat::kJson);
    spdlog::critical("1\n2 step={}", 3);
    spdlog::debug("not asked for");
    SetUpLogging("engine b", "info");
  });
  EXPECT_EQ(CurrentLogFormat(), LogFormat::kText);
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  ASSERT_EQ(lines.size(), 3u) << text;
  const std::string time = "\\{\"time\":\"....-..-..T..:..:..[.][0-9]{6}Z\",";
  EXPECT_TRUE(std::regex_match(
      lines[0],
      std::regex(time + "\"level\":\"info\",\"process\":\"supervisor\","
                        "\"pid\":[0-9]+,\"job\":\"a\","
                        "\"message\":\"job a: created\"\\}")))
      << lines[0];
  EXPECT_TRUE(std::regex_match(
      lines[1],
      std::regex(time + "\"level\":\"critical\",\"process\":\"engine\","
                        "\"pid\":[0-9]+,\"job\":\"b\","
                        "\"message\":\"1\\\\n2 step=3\","
                        "\"fields\":\\{\"step\":\"3\"\\}\\}")))
      << lines[1];
  EXPECT_EQ(lines[2], "");
}

// The journal takes the priority off, and leaves the object.
TEST(LoggingTest, LinesOfJsonInTheJournal) {
  const std::string text = Captured([] {
    struct stat info;
    ASSERT_EQ(::fstat(STDERR_FILENO, &info), 0);
    ::setenv("JOURNAL_STREAM",
             absl::StrCat(info.st_dev, ":", info.st_ino).c_str(), 1);
    SetUpLogging("optstated", "info", LogFormat::kJson);
    spdlog::error("bad");
    ::unsetenv("JOURNAL_STREAM");
    SetUpLogging("optstated", "info");
  });
  EXPECT_THAT(text, StartsWith("<3>{\"time\":\""));
  EXPECT_THAT(text, EndsWith("\"message\":\"bad\"}\n"));
}

TEST(LoggingTest, LinesOfLogfmt) {
  ::unsetenv("JOURNAL_STREAM");
  const std::string text = Captured([] {
    SetUpLogging("optstated", "info", LogFormat::kLogfmt);
    EXPECT_EQ(CurrentLogFormat(), LogFormat::kLogfmt);
    spdlog::info("job {}: created", "a");
    SetUpLogging("engine b", "info", LogFormat::kLogfmt);
    spdlog::warn("1\n2: step={}", 3);
    SetUpLogging("engine b", "info");
  });
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  ASSERT_EQ(lines.size(), 3u) << text;
  const std::string time = "ts=....-..-..T..:..:..[.][0-9]{6}Z ";
  EXPECT_TRUE(std::regex_match(
      lines[0], std::regex(time + "level=info event=\"job a: created\" job=a "
                                  "pid=[0-9]+ process=supervisor")))
      << lines[0];
  EXPECT_TRUE(std::regex_match(
      lines[1], std::regex(time + "level=warn event=\"1\\\\n2\" job=b step=3 "
                                  "pid=[0-9]+ process=engine")))
      << lines[1];
  EXPECT_EQ(lines[2], "");
}

TEST(LoggingTest, LinesOfLogfmtInTheJournal) {
  const std::string text = Captured([] {
    struct stat info;
    ASSERT_EQ(::fstat(STDERR_FILENO, &info), 0);
    ::setenv("JOURNAL_STREAM",
             absl::StrCat(info.st_dev, ":", info.st_ino).c_str(), 1);
    SetUpLogging("optstated", "info", LogFormat::kLogfmt);
    spdlog::error("bad");
    ::unsetenv("JOURNAL_STREAM");
    SetUpLogging("optstated", "info");
  });
  EXPECT_THAT(text, StartsWith("<3>ts="));
  EXPECT_THAT(text, EndsWith(" process=supervisor\n"));
}

TEST(LoggingTest, JournalOfSomebodyElse) {
  EXPECT_FALSE(IsJournal(nullptr, STDERR_FILENO));
  EXPECT_FALSE(IsJournal("1:2", STDERR_FILENO));
  EXPECT_FALSE(IsJournal("1:2", -1));
}

}  // namespace
}  // namespace optstate::observe
