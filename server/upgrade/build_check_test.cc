#include "server/upgrade/build_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace optstate::upgrade {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(CanTakeOverTest, TheSameBuild) {
  EXPECT_TRUE(CheckCanTakeOver(OwnFormatVersions(), OwnFormatVersions()).ok());
}

TEST(CanTakeOverTest, NamesBothBuildsAndWhatTheyDoNotShare) {
  v1::FormatVersions current = OwnFormatVersions();
  current.set_version("2.0");
  current.set_state_max(70);
  v1::FormatVersions next = current;
  next.set_version("1.0");
  next.set_state_max(60);
  const absl::Status status = CheckCanTakeOver(current, next);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("1.0"), HasSubstr("2.0"), HasSubstr("70 here"),
                    HasSubstr(" to 60")));
}

// Stopping the daemon helps where only running processes must understand each
// other.
TEST(CanTakeOverTest, AsksForCheckpointsOfStateThatTheNextCannotOpen) {
  v1::FormatVersions next = OwnFormatVersions();
  next.set_handover(next.handover() + 1);
  EXPECT_THAT(
      std::string(CheckCanTakeOver(OwnFormatVersions(), next).message()),
      AllOf(HasSubstr("or stop the daemon"), Not(HasSubstr("checkpoints"))));
  next.set_state_min(next.state_max() + 1);
  next.set_state_max(next.state_max() + 1);
  EXPECT_THAT(
      std::string(CheckCanTakeOver(OwnFormatVersions(), next).message()),
      AllOf(HasSubstr("save checkpoints of all jobs"),
            HasSubstr("cannot open state of that format")));
}

TEST(CanTakeOverTest, EachProtocolCounts) {
  const v1::FormatVersions own = OwnFormatVersions();
  using Field = void (v1::FormatVersions::*)(uint32_t);
  const std::pair<Field, Field> ranges[] = {
      {&v1::FormatVersions::set_session_min,
       &v1::FormatVersions::set_session_max},
      {&v1::FormatVersions::set_control_min,
       &v1::FormatVersions::set_control_max},
      {&v1::FormatVersions::set_state_min, &v1::FormatVersions::set_state_max},
      {&v1::FormatVersions::set_handover, &v1::FormatVersions::set_handover}};
  for (const auto& [set_min, set_max] : ranges) {
    v1::FormatVersions next = own;
    (next.*set_min)(90);
    (next.*set_max)(91);
    EXPECT_TRUE(absl::IsFailedPrecondition(CheckCanTakeOver(own, next)));
  }
}

// Attached ranks speak the newest protocol that this build does.
TEST(CanTakeOverTest, AnOlderBuildThatRanksCouldNotComeBackTo) {
  const v1::FormatVersions own = OwnFormatVersions();
  v1::FormatVersions next = own;
  next.set_session_min(own.session_max() - 1);
  next.set_session_max(own.session_max() - 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckCanTakeOver(own, next)));
  EXPECT_TRUE(CheckCanTakeOver(next, own).ok());
}

class CheckBuildTest : public testing::Test {
 protected:
  std::string Script(const std::string& text) {
    std::string path = absl::StrCat(testing::TempDir(), "/script");
    std::ofstream(path) << "#!/bin/sh\n" << text;
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }
  static absl::Status Check(const std::string& path) {
    return CheckBuild(path, {"optstated"}).status();
  }
};

TEST_F(CheckBuildTest, WhatCannotBeExecuted) {
  EXPECT_TRUE(absl::IsInvalidArgument(Check("optstated")));
  EXPECT_TRUE(absl::IsNotFound(Check("/nonexistent/optstated")));
  EXPECT_TRUE(absl::IsFailedPrecondition(Check("/tmp")));
  const std::string path = Script("");
  std::filesystem::permissions(path, std::filesystem::perms::owner_read);
  EXPECT_TRUE(absl::IsPermissionDenied(Check(path)));
}

TEST_F(CheckBuildTest, WhatIsNoOptstated) {
  EXPECT_TRUE(absl::IsFailedPrecondition(Check("/bin/true")));
  EXPECT_TRUE(absl::IsFailedPrecondition(Check("/bin/false")));
  EXPECT_TRUE(absl::IsFailedPrecondition(Check(Script("echo hello\n"))));
}

TEST_F(CheckBuildTest, ABuildThatRefusesTheConfiguration) {
  const std::string versions = OwnFormatVersions().ShortDebugString();
  const std::string accepts =
      absl::StrCat("case $1 in --format-versions) echo '", versions,
                   " unknown_to_us: 3';; esac\n");
  EXPECT_TRUE(Check(Script(accepts)).ok());
  const absl::Status refused = Check(Script(
      accepts + "case $1 in --check-config) echo 'line 7'; exit 1;; esac\n"));
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("line 7"));
}

}  // namespace
}  // namespace optstate::upgrade
