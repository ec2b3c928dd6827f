#include "client/ctl/quota_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A user with some limits.
v1::ListUsersReply Ada() {
  v1::ListUsersReply reply;
  v1::UserUse& user = *reply.add_users();
  user.set_uid(4711);
  user.set_user("ada");
  user.mutable_use()->set_jobs(3);
  user.mutable_use()->set_state_bytes(uint64_t{5} << 30);
  user.mutable_use()->set_frames_bytes(1 << 20);
  user.mutable_quota()->set_jobs_max(8);
  user.mutable_quota()->set_sessions_max(512);
  user.mutable_quota()->set_state_bytes_max(uint64_t{4} << 30);
  user.mutable_quota()->set_weight(200);
  user.mutable_keys()->set_jobs_max("quotas[0].jobs_max");
  user.mutable_keys()->set_sessions_max("half of limits.sessions_max");
  user.mutable_keys()->set_state_bytes_max("quotas[0].state_bytes_max");
  user.mutable_keys()->set_weight("quotas[0].weight");
  user.set_part(2.0 / 3);
  return reply;
}

// Returns the lines of the table, with one space between cells.
std::vector<std::string> Lines(const v1::ListUsersReply& reply) {
  const auto text = QuotaTable(reply).Render(/*wide=*/false);
  EXPECT_TRUE(text.ok()) << text.status();
  std::vector<std::string> lines;
  for (const auto line :
       absl::StrSplit(text.value_or(""), '\n', absl::SkipEmpty())) {
    lines.push_back(
        absl::StrJoin(absl::StrSplit(line, ' ', absl::SkipEmpty()), " "));
  }
  return lines;
}

TEST(QuotaTextTest, EachResourceHasALimitAShareAndAKey) {
  EXPECT_THAT(
      Lines(Ada()),
      ElementsAre(
          "OF RESOURCE USED LIMIT SHARE KEY",
          "user ada jobs 3 8 38% quotas[0].jobs_max",
          "user ada sessions 0 512 0% half of limits.sessions_max",
          // The limit was lowered later.
          "user ada state 5.0 GiB 4.0 GiB 125% quotas[0].state_bytes_max",
          "user ada host budget 1.0 MiB - - -", "user ada disk 0 B - - -",
          "user ada cores and disks - weight 200 67% quotas[0].weight"));
}

TEST(QuotaTextTest, AGroupHasNoWeightAndAUserTheDefault) {
  v1::ListUsersReply reply;
  reply.add_users()->mutable_quota()->set_weight(100);
  reply.mutable_users(0)->set_part(1);
  v1::GroupUse& group = *reply.add_groups();
  group.set_group("research");
  group.mutable_use()->set_disk_bytes(1 << 10);
  group.mutable_quota()->set_disk_bytes_max(4 << 10);
  group.mutable_keys()->set_disk_bytes_max("quotas[1].disk_bytes_max");
  const std::vector<std::string> lines = Lines(reply);
  ASSERT_EQ(lines.size(), 12u);
  EXPECT_EQ(lines[6], "user 0 cores and disks - weight 100 100% default");
  EXPECT_EQ(lines[11],
            "group research disk 1.0 KiB 4.0 KiB 25% quotas[1].disk_bytes_max");
}

TEST(QuotaTextTest, NotesSayHowAQuotaIsChanged) {
  v1::ListUsersReply reply = Ada();
  for (const char* text : {"`quotas`", "`limits`", "SIGHUP",
                           "`systemctl reload optstated`", "optctl upgrade"}) {
    EXPECT_THAT(QuotaNotes(reply), HasSubstr(text));
  }
  EXPECT_THAT(QuotaNotes(reply), Not(HasSubstr("no quota")));
  reply.mutable_users(0)->set_is_operator(true);
  EXPECT_THAT(QuotaNotes(reply), HasSubstr("User ada is root"));
}

TEST(QuotaTextTest, AnOlderDaemonTellsNoKeys) {
  v1::ListUsersReply reply = Ada();
  EXPECT_TRUE(CheckTellsKeys(reply).ok());
  reply.add_groups();
  const absl::Status older = CheckTellsKeys(reply);
  EXPECT_TRUE(absl::IsUnimplemented(older)) << older;
  EXPECT_THAT(std::string(older.message()), HasSubstr("optctl upgrade"));
  reply.mutable_groups(0)->mutable_keys();
  EXPECT_TRUE(CheckTellsKeys(reply).ok());
  reply.mutable_users(0)->clear_keys();
  EXPECT_FALSE(CheckTellsKeys(reply).ok());
  EXPECT_FALSE(CheckTellsKeys({}).ok());
}

}  // namespace
}  // namespace optstate::ctl
