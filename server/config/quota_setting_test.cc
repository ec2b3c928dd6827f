#include "server/config/quota_setting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/config/config.h"

namespace optstate::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// A daemon's user who is neither root nor has a quota in these tests.
constexpr uid_t kDaemonUid = 4799;

absl::Status StatusOf(absl::string_view text) {
  return ParseConfig(text, "f.yaml", {}, {kDaemonUid, ""}).status();
}

std::string ErrorOf(absl::string_view text) {
  const absl::Status status = StatusOf(text);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << text << status;
  return std::string(status.message());
}

TEST(QuotaSettingTest, UsersAndGroupsByNameAndNumber) {
  const auto config = ParseConfig(
      "quotas:\n"
      "  - {user: \"4711\", jobs_max: 3, state_bytes_max: 2 GiB, weight: 200}\n"
      "  - {group: root, frames_bytes_max: 1 MiB, disk_bytes_max: 1 TiB}\n"
      "  - {group: 4711, sessions_max: 7}\n",
      "f.yaml", {}, {kDaemonUid, ""});
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_EQ(config->quotas_size(), 3);
  EXPECT_EQ(config->quotas(0).state_bytes_max(), uint64_t{2} << 30);
  EXPECT_EQ(config->quotas(0).weight(), 200u);
  EXPECT_EQ(config->quotas(1).group(), "root");
  EXPECT_EQ(config->quotas(2).group(), "4711");
  EXPECT_EQ(config->quotas(2).sessions_max(), 7u);
}

TEST(QuotaSettingTest, ItNamesAUserOrAGroup) {
  EXPECT_THAT(ErrorOf("quotas:\n  - {jobs_max: 3}\n"),
              AllOf(StartsWith("f.yaml:2: quotas[0]: "),
                    HasSubstr("one user or one group")));
  EXPECT_THAT(ErrorOf("quotas:\n  - user: \"4711\"\n"
                      "  - {user: \"4712\", group: root}\n"),
              AllOf(StartsWith("f.yaml:3: quotas[1]: "),
                    HasSubstr("one user or one group")));
}

TEST(QuotaSettingTest, WhoDoesNotExistIsSaid) {
  EXPECT_THAT(
      ErrorOf("quotas: [{user: no such user}]\n"),
      AllOf(StartsWith("f.yaml:1: quotas[0]: user no such user: "),
            HasSubstr("this machine has no user"), HasSubstr("number")));
  EXPECT_THAT(ErrorOf("quotas: [{group: no such group}]\n"),
              HasSubstr("this machine has no group"));
}

TEST(QuotaSettingTest, NobodyHasTwo) {
  EXPECT_THAT(ErrorOf("quotas:\n  - user: \"4711\"\n  - user: \"04711\"\n"),
              AllOf(StartsWith("f.yaml:3: quotas[1]: user 04711"),
                    HasSubstr("already, in quotas[0]")));
  EXPECT_THAT(ErrorOf("quotas:\n  - group: root\n  - group: 0\n"),
              AllOf(StartsWith("f.yaml:3: quotas[1]: group 0 (number 0)"),
                    HasSubstr("already, in quotas[0]")));
  // A user and a group may have the same number.
  EXPECT_TRUE(StatusOf("quotas: [{user: 4711}, {group: 4711}]\n").ok());
}

TEST(QuotaSettingTest, OperatorsHaveNone) {
  for (const char* user : {"root", "0", "4799"}) {
    EXPECT_THAT(ErrorOf(std::string("quotas: [{user: ") + user + "}]\n"),
                HasSubstr("is an operator"));
  }
  EXPECT_TRUE(StatusOf("quotas: [{group: root}]\n").ok());
}

TEST(QuotaSettingTest, WeightsAreBounded) {
  for (const char* holder : {"user: 4711", "group: root"}) {
    const auto with = [holder](const char* weight) {
      return absl::StrCat("quotas: [{", holder, ", weight: ", weight, "}]\n");
    };
    EXPECT_TRUE(StatusOf(with("10000")).ok());
    EXPECT_THAT(ErrorOf(with("10001")),
                HasSubstr("weight must be from 1 to 10000"));
  }
}

TEST(QuotaSettingTest, AnUnknownKeyIsAnError) {
  EXPECT_THAT(ErrorOf("quotas:\n  - user: 4711\n    jobs: 3\n"),
              AllOf(StartsWith("f.yaml:3: "), HasSubstr("quotas.jobs"),
                    HasSubstr("jobs_max")));
}

TEST(QuotaSettingTest, EveryFaultIsFound) {
  v1::DaemonConfig config;
  config.add_quotas();
  config.add_quotas()->set_user("4711");
  config.add_quotas()->set_user("root");
  const auto faults = CheckQuotas(config, kDaemonUid);
  ASSERT_EQ(faults.size(), 2u);
  EXPECT_EQ(faults[0].first, "quotas[0]");
  EXPECT_EQ(faults[1].first, "quotas[2]");
  EXPECT_THAT(CheckQuotas(v1::DaemonConfig(), kDaemonUid), IsEmpty());
}

}  // namespace
}  // namespace optstate::config
