// The HTTP server of a real optstated: what it says of a job, and what becomes
// of it at the start, at an upgrade and at the end.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/metrics/testing_client.h"
#include "server/testing/daemon_fixture.h"

namespace optstate::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class DaemonMetricsTest : public DaemonTest {
 protected:
  std::string address() const { return "unix:" + root() + "/http.sock"; }
  pid_t StartWithMetrics() {
    const pid_t pid = StartDaemon({"--metrics", address()});
    // Its first answer comes when all has been started.
    EXPECT_TRUE(Status().ok());
    return pid;
  }

  std::string Metrics() const {
    return metrics::BodyOf(metrics::Get(address(), "/metrics"));
  }
};

TEST_F(DaemonMetricsTest, AreOffByDefault) {
  StartDaemon();
  ASSERT_TRUE(Status().ok());
  EXPECT_THAT(Log(), Not(HasSubstr("metrics: listening")));
}

TEST_F(DaemonMetricsTest, SayWhatTheDaemonHas) {
  StartWithMetrics();
  const auto session = Open("a");
  ASSERT_TRUE(session.ok()) << session.status();
  // The report of a second ago may have been without it.
  EXPECT_TRUE(Eventually([this] {
    return absl::StrContains(Metrics(), "optstate_job_up{job_name=\"a\"} 1\n");
  })) << Metrics();
  EXPECT_THAT(
      Metrics(),
      AllOf(StartsWith("# HELP optstate_build_info "),
            HasSubstr("optstate_job_phase{job_name=\"a\",phase=\"empty\"} 1\n"),
            HasSubstr("optstate_engine_starts_total{how=\"started\"} 1\n"),
            HasSubstr("optstate_sessions_started_total 1\n"),
            HasSubstr(absl::StrCat("directory=\"", state(), "\""))));
  const std::string json =
      metrics::BodyOf(metrics::Get(address(), "/status.json"));
  EXPECT_THAT(json, AllOf(HasSubstr(absl::StrCat("\"state_dir\":\"", state())),
                          HasSubstr("\"name\":\"a\"")));
  EXPECT_THAT(metrics::Get(address(), "/"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(DaemonMetricsTest, CountARefusal) {
  StartWithMetrics();
  const UniqueFd stranger = Connect();
  metrics::SendTo(stranger, "nonsense");
  ASSERT_TRUE(ClosedByPeer(stranger.get()));
  EXPECT_THAT(Metrics(),
              HasSubstr("optstate_connections_refused_total{wire=\"session\","
                        "code=\"invalid_argument\"} 1\n"));
}

TEST_F(DaemonMetricsTest, AnAddressThatIsTakenIsAnErrorOfTheStart) {
  StartWithMetrics();
  const ProcessExit second =
      RunToEnd({"--state-dir", root() + "/state2", "--socket",
                root() + "/s2.sock", "--metrics", address()});
  EXPECT_EQ(second.code, 1);
  EXPECT_THAT(second.output,
              HasSubstr(absl::StrCat("metrics.address (--metrics) \"",
                                     address(), "\": ")));
  EXPECT_EQ(RunToEnd({"--metrics", "nowhere"}).code, 2);
}

TEST_F(DaemonMetricsTest, GoOnAfterAnUpgrade) {
  const pid_t pid = StartWithMetrics();
  ASSERT_TRUE(Open("a").ok());
  const auto reply = Upgrade(CopyOfTheBinary("next"));
  ASSERT_TRUE(reply.ok()) << reply.status();
  AwaitUpgrade(reply->id());
  // Counts begin anew: the next build has found the engine running.
  EXPECT_THAT(Metrics(),
              HasSubstr("optstate_engine_starts_total{how=\"adopted\"} 1\n"));
  EXPECT_EQ(Status()->pid(), pid);
}

TEST_F(DaemonMetricsTest, GoOnAfterAnUpgradeThatFails) {
  const pid_t pid = StartWithMetrics();
  const std::string binary = root() + "/vanishes";
  std::ofstream(binary)
      << "#!/bin/sh\ncase \"$*\" in *--check-config*) rm \"$0\";; *) exec "
      << ExecutableOf(pid) << " --format-versions;; esac\n";
  ASSERT_EQ(::chmod(binary.c_str(), 0700), 0);
  const auto reply = Upgrade(binary);
  ASSERT_TRUE(reply.ok()) << reply.status();
  ASSERT_EQ(AwaitUpgrade(reply->id()).upgrade().problems_size(), 1);
  EXPECT_THAT(Metrics(), HasSubstr("\noptstate_upgrade_running 0\n"));
}

TEST_F(DaemonMetricsTest, AnAddressThatTheNextBuildCannotHaveIsRefusedBefore) {
  const std::string file = root() + "/c.yaml";
  std::ofstream(file) << "metrics: {address: '" << address() << "'}\n";
  StartDaemon({"--config", file});
  std::ofstream(root() + "/file") << "no socket\n";
  std::ofstream(file) << "metrics: {address: 'unix:" << root() << "/file'}\n";
  const absl::Status refused = Upgrade("").status();
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("is there and is not a socket"));
  EXPECT_THAT(Metrics(), StartsWith("# HELP"));

  std::ofstream(file) << "metrics: {address: 'unix:" << root()
                      << "/moved.sock'}\n";
  const auto reply = Upgrade("");
  ASSERT_TRUE(reply.ok()) << reply.status();
  AwaitUpgrade(reply->id());
  EXPECT_THAT(metrics::Get("unix:" + root() + "/moved.sock", "/metrics"),
              StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_FALSE(Exists(root() + "/http.sock"));
}

TEST_F(DaemonMetricsTest, EndWithTheDaemon) {
  const pid_t pid = StartWithMetrics();
  // A client that never finishes its request does not hold the daemon.
  const UniqueFd slow = metrics::ConnectTo(address());
  metrics::SendTo(slow, "GET /");
  ::kill(pid, SIGTERM);
  EXPECT_EQ(AwaitExit(pid).code, 0);
  EXPECT_FALSE(Exists(root() + "/http.sock"));
}

}  // namespace
}  // namespace optstate::server
