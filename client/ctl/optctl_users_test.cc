// optctl quota, get users and get quotas, against a real daemon with quotas.

#include <unistd.h>

#include <csignal>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {
namespace {

class OptctlUsersTest : public OptctlTest {
 protected:
  void SetUp() override {
    TestDaemon::Options options;
    // A user who has no job here.
    options.config =
        "quotas:\n"
        "  - {user: \"4711\", jobs_max: 3, state_bytes_max: 2 GiB, weight: "
        "200}\n"
        "  - {group: \"4712\", sessions_max: 7, frames_bytes_max: 1 MiB}\n";
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }

  v1::ListUsersReply Reply(const std::string& verb) const {
    return ReplyOf(absl::StrCat("get ", verb));
  }
  v1::ListUsersReply ReplyOf(const std::string& command) const {
    const Ran ran = Optctl(absl::StrCat(command, " -o json"));
    EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
    v1::ListUsersReply reply;
    EXPECT_TRUE(
        google::protobuf::util::JsonStringToMessage(ran.output, &reply).ok())
        << ran.output;
    return reply;
  }
  static const v1::UserUse* Find(const v1::ListUsersReply& reply, uid_t uid) {
    for (const v1::UserUse& user : reply.users()) {
      if (user.uid() == uid) return &user;
    }
    return nullptr;
  }
};

TEST_F(OptctlUsersTest, UsersHaveWhatTheirJobsTake) {
  const auto session = Train("gpt");
  const v1::ListUsersReply reply = Reply("users");
  const v1::UserUse* const own = Find(reply, ::geteuid());
  ASSERT_NE(own, nullptr);
  EXPECT_EQ(own->use().jobs(), 1u);
  EXPECT_EQ(own->use().sessions(), 1u);
  EXPECT_GT(own->use().state_bytes(), 0u);
  EXPECT_TRUE(own->is_operator());
  const v1::UserUse* const other = Find(reply, 4711);
  ASSERT_NE(other, nullptr);
  EXPECT_EQ(other->use().jobs(), 0u);
  EXPECT_EQ(other->quota().jobs_max(), 3u);
  const Ran ran = Optctl("get users");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  for (const char* text : {"USER", "ASLEEP", "SESSIONS", "FRAMES", "4711"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << text << ran.output;
  }
  EXPECT_FALSE(absl::StrContains(ran.output, "OPERATOR")) << ran.output;
  EXPECT_TRUE(
      absl::StrContains(Optctl("get users -o wide").output, "OPERATOR"));
}

TEST_F(OptctlUsersTest, OneUserIsAskedForByNameOrNumber) {
  const v1::ListUsersReply reply = Reply("users 4711");
  ASSERT_EQ(reply.users_size(), 1);
  EXPECT_EQ(reply.users(0).uid(), 4711u);
  const v1::ListUsersReply root = Reply("users root");
  ASSERT_EQ(root.users_size(), 1);
  EXPECT_EQ(root.users(0).user(), "root");
  const Ran unknown = Optctl("get users nobody-of-this-name");
  EXPECT_EQ(unknown.exit_code, kExitNotFound) << unknown.output;
  EXPECT_TRUE(absl::StrContains(unknown.output, "nobody-of-this-name"))
      << unknown.output;
}

TEST_F(OptctlUsersTest, QuotasAreShownWithWhatIsTaken) {
  const auto session = Train("gpt");
  const Ran ran = Optctl("get quotas");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  // A user's limit that is not its own is that of all users: half of 1024.
  for (const char* text :
       {"OF", "WEIGHT", "0/3", "0/512", "0 B/2.0 GiB", "0 B/-", "200", "group",
        "4712", "0/7", "0 B/1.0 MiB", "1/-"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << text << ran.output;
  }
  const v1::ListUsersReply reply = Reply("quotas");
  ASSERT_EQ(reply.groups_size(), 1);
  EXPECT_EQ(reply.groups(0).group(), "4712");
  EXPECT_EQ(reply.groups(0).quota().sessions_max(), 7u);
  EXPECT_EQ(reply.groups(0).quota().frames_bytes_max(), 1u << 20);
  const Ran yaml = Optctl("get quotas -o yaml");
  EXPECT_EQ(yaml.exit_code, kExitOk) << yaml.output;
  EXPECT_TRUE(absl::StrContains(yaml.output, "jobs_max: 3")) << yaml.output;
}

TEST_F(OptctlUsersTest, AQuotaSaysWhatIsUsedAllowedAndWhichKeySaysSo) {
  const auto session = Train("gpt");
  const Ran ran = Optctl("quota 4711");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  for (const char* text :
       {"user 4711", "RESOURCE", "host budget", "0%", "2.0 GiB",
        "quotas[0].jobs_max", "quotas[0].state_bytes_max", "weight 200",
        "half of limits.sessions_max", "quotas[0].weight",
        "`systemctl reload optstated`"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << text << ran.output;
  }
  // This user's engine runs, and has the default weight of 100.
  EXPECT_TRUE(absl::StrContains(ran.output, "67%")) << ran.output;
  const v1::ListUsersReply reply = ReplyOf("quota 4711");
  ASSERT_EQ(reply.users_size(), 1);
  EXPECT_EQ(reply.users(0).keys().jobs_max(), "quotas[0].jobs_max");
  EXPECT_EQ(reply.groups_size(), 0);
  const Ran yaml = Optctl("quota 4711 -o yaml");
  EXPECT_EQ(yaml.exit_code, kExitOk) << yaml.output;
  EXPECT_TRUE(absl::StrContains(yaml.output, "quotas[0].jobs_max"))
      << yaml.output;
}

// An operator has no other limits, and is not all users.
TEST_F(OptctlUsersTest, WithoutANameAQuotaIsTheCallers) {
  const auto session = Train("gpt");
  const v1::ListUsersReply reply = ReplyOf("quota");
  ASSERT_EQ(reply.users_size(), 1);
  EXPECT_EQ(reply.users(0).uid(), ::geteuid());
  EXPECT_EQ(reply.users(0).use().jobs(), 1u);
  const Ran ran = Optctl("quota");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "no quota and no limit of users"))
      << ran.output;
  EXPECT_FALSE(absl::StrContains(ran.output, "4711")) << ran.output;
}

TEST_F(OptctlUsersTest, TheQuotaOfAGroupIsThatOfNoUser) {
  const v1::ListUsersReply reply = ReplyOf("quota @4712");
  EXPECT_EQ(reply.users_size(), 0);
  ASSERT_EQ(reply.groups_size(), 1);
  EXPECT_EQ(reply.groups(0).keys().sessions_max(), "quotas[1].sessions_max");
  const Ran ran = Optctl("quota @4712");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "group 4712")) << ran.output;
  EXPECT_FALSE(absl::StrContains(ran.output, "weight")) << ran.output;
  const Ran none = Optctl("quota @4711");
  EXPECT_EQ(none.exit_code, kExitNotFound) << none.output;
  EXPECT_TRUE(absl::StrContains(none.output, "has no quota")) << none.output;
  EXPECT_EQ(Optctl("quota @").exit_code, kExitUsage);
  EXPECT_EQ(Optctl("quota nobody-of-this-name").exit_code, kExitNotFound);
}

TEST_F(OptctlUsersTest, AJobThatGivesNoAnswerIsNamed) {
  const auto session = Train("gpt");
  const Process engine = StopEngine("gpt");
  const Ran ran = Optctl("--timeout 1 get users");
  EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
  for (const char* text : {"job gpt", "4711", "optctl: not all is known"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
  engine.Signal(SIGCONT);
}

TEST_F(OptctlUsersTest, CompletionOffersNoJobsForAUser) {
  const Ran completed = RunBinary(
      "completion bash > $TEST_TMPDIR/c && bash -c '. $TEST_TMPDIR/c; "
      "optctl() { echo NAME; echo gpt; }; "
      "COMP_WORDS=(optctl get users g) COMP_CWORD=3; _optctl; "
      "echo \"${COMPREPLY[@]}\"; "
      "COMP_WORDS=(optctl quota g) COMP_CWORD=2; _optctl; "
      "echo \"${COMPREPLY[@]}\"; "
      "COMP_WORDS=(optctl quo) COMP_CWORD=1; _optctl; "
      "echo \"${COMPREPLY[@]}\"'");
  EXPECT_EQ(completed.output, "\n\nquota\n");
}

}  // namespace
}  // namespace optstate::ctl
