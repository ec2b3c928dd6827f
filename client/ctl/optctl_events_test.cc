// optctl events and logs, against a real daemon.

#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {
namespace {

std::vector<v1::Event> Parsed(const std::string& lines) {
  std::vector<v1::Event> events;
  for (const absl::string_view line :
       absl::StrSplit(lines, '\n', absl::SkipEmpty())) {
    events.emplace_back();
    EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(std::string(line),
                                                            &events.back())
                    .ok())
        << line;
  }
  return events;
}

class OptctlEventsTest : public OptctlTest {
 protected:
  // Runs optctl in the background until Ctrl-C.
  class Follower {
   public:
    Follower(const OptctlEventsTest& test, const std::string& arguments)
        : folder_(test.daemon_->directory()) {
      thread_ = std::thread([this, line = test.AtDaemon(arguments)] {
        ran_ = RunCommand(absl::StrCat("client/ctl/optctl ", line, " > ",
                                       OutputFile(), " 2>&1 & echo $! > ",
                                       PidFile(), "; wait $!"));
      });
    }
    ~Follower() {
      if (thread_.joinable()) End();
    }
    // Waits until it has printed this.
    void Await(const std::string& text) const {
      while (!absl::StrContains(Output(), text)) std::this_thread::yield();
    }
    Ran End() {
      pid_t pid = 0;
      while (pid == 0) std::ifstream(PidFile()) >> pid;
      ::kill(pid, SIGINT);
      thread_.join();
      ran_.output = Output();
      return ran_;
    }

   private:
    std::string OutputFile() const { return folder_ + "/followed"; }
    std::string PidFile() const { return folder_ + "/follower_pid"; }
    std::string Output() const {
      std::ifstream file(OutputFile());
      return std::string(std::istreambuf_iterator<char>(file), {});
    }

    const std::string folder_;
    Ran ran_;
    std::thread thread_;
  };

  const std::string user_ = absl::StrCat("uid ", ::geteuid());
};

TEST_F(OptctlEventsTest, WhatHasHappenedIsListed) {
  Train("gpt")->Close();
  ASSERT_EQ(Optctl("delete job gpt").exit_code, kExitOk);
  ASSERT_EQ(Optctl("drain").exit_code, kExitOk);
  ASSERT_EQ(Optctl("drain --resume").exit_code, kExitOk);
  const Ran all = Optctl("events");
  EXPECT_EQ(all.exit_code, kExitOk) << all.output;
  for (const char* text :
       {"TIME", "daemon_started", "job_created", "engine_started",
        "job_deleted", "drain_begun", "drain_ended"}) {
    EXPECT_TRUE(absl::StrContains(all.output, text)) << all.output;
  }
  const Ran of_job = Optctl("events gpt -o json");
  EXPECT_EQ(of_job.exit_code, kExitOk) << of_job.output;
  const std::vector<v1::Event> events = Parsed(of_job.output);
  ASSERT_EQ(events.size(), 3u) << of_job.output;
  EXPECT_EQ(events[0].kind(), "job_created");
  EXPECT_EQ(events[1].kind(), "engine_started");
  EXPECT_EQ(events[2].kind(), "job_deleted");
  EXPECT_EQ(events[2].actor(), user_);
  EXPECT_EQ(events[2].sequence(), events[1].sequence() + 1);
}

TEST_F(OptctlEventsTest, SettingsAndDeathsAreListed) {
  const auto session = Train("gpt");
  ASSERT_TRUE(daemon_->KillEngine("gpt").ok());
  const auto outcome = Step(*session, 2);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  const Ran ran = Optctl("events gpt");
  EXPECT_TRUE(absl::StrContains(ran.output, "was killed by signal 9"))
      << ran.output;
}

TEST_F(OptctlEventsTest, OnlyWhatIsYoungEnough) {
  EXPECT_EQ(Parsed(Optctl("events -o json --since 1h").output).size(), 1u);
  EXPECT_EQ(Optctl("events --since yesterday").exit_code, kExitUsage);
  EXPECT_EQ(Optctl("events ../etc").exit_code, kExitUsage);
  const Ran none = Optctl("events absent");
  EXPECT_EQ(none.exit_code, kExitOk);
  EXPECT_EQ(none.output, "none found\n");
}

TEST_F(OptctlEventsTest, WhatHappensIsFollowed) {
  Follower follower(*this, "events --follow");
  follower.Await("daemon_started");
  const auto session = Train("gpt");
  follower.Await("job gpt: created (" + user_ + ")");
  const Ran ran = follower.End();
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
}

// The next build goes on with the same events, and the follower finds it.
TEST_F(OptctlEventsTest, AnUpgradeIsFollowed) {
  const auto session = Train("gpt");
  const std::string binary = absl::StrCat(daemon_->directory(), "/next");
  std::filesystem::copy_file("server/optstated", binary);
  Follower follower(*this, "--timeout 60 events --follow -o json");
  follower.Await("engine_started");
  const Ran upgraded =
      Optctl(absl::StrCat("upgrade --timeout 60 --binary ", binary));
  ASSERT_EQ(upgraded.exit_code, kExitOk) << upgraded.output;
  follower.Await("upgrade_done");
  const Ran ran = follower.End();
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  const std::vector<v1::Event> followed = Parsed(ran.output);
  std::vector<std::string> kinds;
  for (size_t i = 0; i < followed.size(); ++i) {
    kinds.push_back(followed[i].kind());
    if (i == 0) continue;
    EXPECT_EQ(followed[i].sequence(), followed[i - 1].sequence() + 1) << i;
  }
  ASSERT_GE(kinds.size(), 5u);
  kinds.resize(5);
  EXPECT_EQ(kinds, (std::vector<std::string>{"daemon_started", "job_created",
                                             "engine_started", "upgrade_begun",
                                             "daemon_started"}));
  EXPECT_EQ(followed[3].actor(), user_);
}

TEST_F(OptctlEventsTest, TheLogOfADaemonWithoutSystemdIsElsewhere) {
  const Ran ran = Optctl("logs gpt");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "it writes to its stderr, "))
      << ran.output;
  EXPECT_EQ(Optctl("logs 'a b'").exit_code, kExitUsage);
  EXPECT_EQ(Optctl("logs -o json").exit_code, kExitUsage);
}

}  // namespace
}  // namespace optstate::ctl
