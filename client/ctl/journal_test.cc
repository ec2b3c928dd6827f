#include "client/ctl/journal.h"

#include <unistd.h>

#include <regex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

std::string UnitName(absl::string_view cgroup) {
  const std::optional<JournalUnit> unit = UnitInCgroup(cgroup);
  if (!unit.has_value()) return "none";
  return unit->is_users ? unit->name + " of a user" : unit->name;
}

TEST(JournalTest, UnitsOfServices) {
  EXPECT_EQ(UnitName("0::/system.slice/optstated.service\n"),
            "optstated.service");
  // cgroup v1, and the daemon's own groups below its unit.
  EXPECT_EQ(UnitName("12:cpu,cpuacct:/system.slice/x.service\n"
                     "1:name=systemd:/system.slice/optstated.service/engines\n"
                     "0::/\n"),
            "optstated.service");
  EXPECT_EQ(UnitName("0::/user.slice/user-1000.slice/user@1000.service/"
                     "app.slice/optstated.service\n"),
            "optstated.service of a user");
}

TEST(JournalTest, ProcessesOfNoService) {
  for (const char* cgroup :
       {"", "0::/\n", "nonsense", "0::/user.slice/session-2.scope\n",
        "0::/system.slice/docker-0a1b.scope\n", "4:cpu:/x.service\n",
        "0::/user.slice/user-1000.slice/user@1000.service/tmux.scope\n",
        "0::/user.slice/user-1000.slice/user@1000.service\n"}) {
    EXPECT_EQ(UnitName(cgroup), "none") << cgroup;
  }
}

TEST(JournalTest, AProcessThatIsNotThere) {
  // The kernel gives no process this pid.
  const auto unit = UnitOfDaemon(1 << 30);
  EXPECT_TRUE(absl::IsNotFound(unit.status())) << unit.status();
}

TEST(JournalTest, CommandLines) {
  JournalQuery query;
  query.unit = {"optstated.service", false};
  EXPECT_EQ(*JournalCommand(query),
            (std::vector<std::string>{"journalctl", "--unit=optstated.service",
                                      "--output=short-iso"}));
  query.unit.is_users = true;
  query.follow = true;
  query.since = absl::Minutes(10);
  query.lines_max = 7;
  EXPECT_EQ(*JournalCommand(query),
            (std::vector<std::string>{"journalctl", "--user",
                                      "--unit=optstated.service",
                                      "--output=short-iso", "--since=-600s",
                                      "--lines=7", "--no-pager", "--follow"}));
  query.job = "a; rm -rf /";
  EXPECT_TRUE(absl::IsInvalidArgument(JournalCommand(query).status()));
}

TEST(JournalTest, LinesOfAJob) {
  JournalQuery query;
  query.job = "gpt-2.xl";
  const auto command = JournalCommand(query);
  ASSERT_TRUE(command.ok()) << command.status();
  std::string pattern;
  for (const std::string& word : *command) {
    if (absl::StartsWith(word, "--grep=")) {
      pattern = std::string(absl::StripPrefix(word, "--grep="));
    }
  }
  const std::regex regex(pattern);
  for (const char* line :
       {"job gpt-2.xl: created by uid 7", "engine gpt-2.xl: rank 1 lost",
        "delete job \"gpt-2.xl\" by uid 7: OK", "workers: job=gpt-2.xl count=8",
        "session for job gpt-2.xl of uid 7", "the engine of job gpt-2.xl.",
        "upgrade: job gpt-2.xl",
        R"({"time":"t","process":"engine","job":"gpt-2.xl","message":"x"})",
        R"({"time":"t","message":"delete job \"gpt-2.xl\" by uid 7: OK"})",
        R"({"time":"t","message":"the engine of job gpt-2.xl."})",
        R"(ts=t level=info event=drained job=gpt-2.xl pid=7 process=engine)",
        R"(ts=t level=info event="delete job \"gpt-2.xl\": OK" pid=7)"}) {
    EXPECT_TRUE(std::regex_search(line, regex)) << line;
  }
  for (const char* line :
       {"job gpt-2.xl2: created", "job gpt-2.xl.b: created", "job gpt-2axl: x",
        "job other: created", "job my-gpt-2.xl: created", "gpt-2.xl",
        "job gpt-2.xl-b: created",
        R"({"time":"t","process":"engine","job":"gpt-2.xl2","message":"x"})",
        R"({"time":"t","process":"engine","job":"my-gpt-2.xl"})",
        R"({"time":"t","message":"delete job \"gpt-2.xl.b\" by uid 7"})",
        R"(ts=t level=info event=drained job=gpt-2.xl2 pid=7 process=engine)",
        R"(ts=t level=info event=gpt-2.xl pid=7 process=engine)"}) {
    EXPECT_FALSE(std::regex_search(line, regex)) << line;
  }
}

}  // namespace
}  // namespace optstate::ctl
