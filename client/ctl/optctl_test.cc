// Tests optctl as a user runs it: the real binary against a real daemon.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"
#include "proto/types/unique_fd.h"
#include "tests/faults/process_state.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::ctl {
namespace {

using client::Session;

struct Ran {
  int exit_code = -1;
  std::string output;  // stdout and stderr
};

Ran RunCommand(const std::string& command) {
  Ran ran;
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return ran;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    ran.output.append(buffer, n);
  }
  const int status = ::pclose(pipe);
  if (WIFEXITED(status)) ran.exit_code = WEXITSTATUS(status);
  return ran;
}

Ran RunBinary(const std::string& arguments,
              const std::string& redirections = "2>&1") {
  return RunCommand(
      absl::StrCat("client/ctl/optctl ", arguments, " ", redirections));
}

class OptctlTest : public testing::Test {
 protected:
  void SetUp() override {
    auto daemon = TestDaemon::Start();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }

  // Trains a job of two parameters for one step; the session stays open.
  std::unique_ptr<Session> Train(const std::string& job) {
    client::SessionOptions options;
    options.endpoint = daemon_->shm_endpoint();
    options.job = job;
    options.layout.groups.resize(1);
    options.layout.parameters = {{"weight", {2, 3}, 6}, {"bias", {3}, 3}};
    auto session = Session::Open(options);
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return nullptr;
    const std::vector<float> ones(6, 1.0f);
    const auto bytes = absl::MakeConstSpan(
        reinterpret_cast<const std::byte*>(ones.data()), 24);
    EXPECT_TRUE((*session)->BeginLoad().ok());
    for (uint32_t p = 0; p < 2; ++p) {
      EXPECT_TRUE((*session)
                      ->Load(client::StateArray::kMaster, p, DType::kFloat32,
                             bytes.first(p == 0 ? 24 : 12))
                      .ok());
    }
    EXPECT_TRUE((*session)->FinishLoad().ok());
    const auto outcome = Step(**session, 1);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    return *std::move(session);
  }

  static absl::StatusOr<client::Outcome> Step(Session& session, uint64_t step) {
    const std::vector<float> ones(6, 1.0f);
    const void* const gradients[] = {ones.data(), ones.data()};
    const absl::Status pushed =
        session.PushGradients(step, 0, {0, 1}, gradients);
    if (!pushed.ok()) return pushed;
    client::CommitOptions commit;
    commit.step = step;
    commit.groups.resize(1);
    return session.Commit(commit);
  }

  std::string AtDaemon(const std::string& arguments) const {
    return absl::StrCat("--endpoint ", daemon_->shm_endpoint(), " ", arguments);
  }
  Ran Optctl(const std::string& arguments) const {
    return RunBinary(AtDaemon(arguments));
  }
  // Runs optctl with a stdout that accepts no output.
  Ran OptctlToFull(const std::string& arguments) const {
    return RunBinary(AtDaemon(arguments), "2>&1 >/dev/full");
  }

  // Stops the engine; returns when none of its threads runs.
  Process StopEngine(const std::string& job) const {
    const auto described = daemon_->GetJob(job);
    EXPECT_TRUE(described.ok()) << described.status();
    Process engine(static_cast<pid_t>(described->engine_pid()));
    engine.Signal(SIGSTOP);
    while (!faults::IsStopped(engine.pid())) std::this_thread::yield();
    return engine;
  }

  // Returns the pid of a running engine, other than `last`, that calls its job
  // FAILED.
  int64_t AwaitFailedEngine(const std::string& name, int64_t last) {
    while (true) {
      const auto job = daemon_->GetJob(name);
      if (job.ok() && job->phase() == v1::JOB_PHASE_FAILED &&
          job->engine_pid() != 0 && job->engine_pid() != last) {
        return job->engine_pid();
      }
      std::this_thread::yield();
    }
  }

  std::unique_ptr<TestDaemon> daemon_;
};

TEST_F(OptctlTest, JsonIsTheReplyMessage) {
  const auto session = Train("gpt");
  const Ran ran = Optctl("describe job gpt -o json");
  ASSERT_EQ(ran.exit_code, kExitOk) << ran.output;
  v1::Job job;
  ASSERT_TRUE(
      google::protobuf::util::JsonStringToMessage(ran.output, &job).ok())
      << ran.output;
  EXPECT_EQ(job.name(), "gpt");
  EXPECT_EQ(job.committed_step(), 1u);
  EXPECT_EQ(job.element_count(), 9u);
  EXPECT_EQ(job.sessions_size(), 1);
}

// A request for values from a hanging engine fails, and no number is made up
// for them.
TEST_F(OptctlTest, WhatAStoppedEngineDoesNotSayIsUnknown) {
  const auto session = Train("gpt");
  const Process engine = StopEngine("gpt");
  const struct {
    const char* arguments;
    const char* says;
  } asked[] = {
      {"get jobs", "gpt  ?        1   ?/1      2        9 160.0 KiB adamw"},
      {"get sessions", "gave no answer: job gpt (engine of job \"gpt\": "},
      {"get sessions --job gpt -o json", "\"sessions\": []"},
      {"status", "? (0 without 1 jobs that gave no answer)"},
      {"status -o json", "\"unanswered\": [\n  {\n   \"name\": \"gpt\""},
      {"describe job gpt", "? of 1 attached"},
  };
  for (const auto& [arguments, says] : asked) {
    const Ran ran = Optctl(absl::StrCat("--timeout 1 ", arguments));
    EXPECT_EQ(ran.exit_code, kExitUnreachable) << arguments;
    for (const char* text : {says, "optctl: not all is known"}) {
      EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
    }
    EXPECT_FALSE(absl::StrContains(ran.output, "none found")) << ran.output;
  }
  engine.Signal(SIGCONT);
  EXPECT_EQ(Optctl("get jobs").exit_code, kExitOk);
}

// The daemon gives up before optctl does, so its message arrives.
TEST_F(OptctlTest, WhatWaitsForAStoppedEngineIsSaidInTime) {
  const auto session = Train("gpt");
  const Process engine = StopEngine("gpt");
  const struct {
    const char* arguments;
    const char* says;
    int exit_code;
  } asked[] = {
      {"get params gpt", "engine of job \"gpt\": Deadline Exceeded",
       kExitUnreachable},
      {"delete job gpt", "does not say whether ranks are attached",
       kExitRefused},
      {"recover gpt", "has not failed", kExitRefused},
      {"upgrade", "the upgrade has begun", kExitUnreachable},
      {"delete job gpt --force", "job \"gpt\" is still being deleted",
       kExitUnreachable},
  };
  for (const auto& [arguments, says, exit_code] : asked) {
    const Ran ran = Optctl(absl::StrCat("--timeout 1 ", arguments));
    EXPECT_EQ(ran.exit_code, exit_code) << arguments << ": " << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, says)) << ran.output;
  }
  engine.Signal(SIGCONT);
  EXPECT_TRUE(engine.AwaitEnd(absl::InfiniteFuture()).ok());
}

TEST_F(OptctlTest, DescribeTellsWhereTimeAndMemoryGo) {
  const auto session = Train("gpt");
  ASSERT_TRUE(Step(*session, 2).ok());
  const Ran json = Optctl("describe job gpt -o json");
  v1::Job job;
  ASSERT_TRUE(
      google::protobuf::util::JsonStringToMessage(json.output, &job).ok())
      << json.output;
  EXPECT_EQ(job.last_step_times().steps(), 1u);
  EXPECT_EQ(job.mean_step_times().steps(), 2u);
  for (const v1::StepTimes* times :
       {&job.last_step_times(), &job.mean_step_times()}) {
    EXPECT_GT(times->staging_ns(), 0u);
    EXPECT_GT(times->decide_ns(), 0u);
    EXPECT_GT(times->update_ns(), 0u);
    EXPECT_GT(times->publish_ns(), 0u);
    // AdamW in fp32: the gradient once, the parameter and two arrays twice.
    EXPECT_EQ(times->update_bytes(), 9u * (4 + 3 * 8));
  }
  int told = 0;
  for (const v1::ArrayBytes& array : job.arrays()) {
    if (array.name() != "parameters" && array.name() != "exp_avg") continue;
    ++told;
    ASSERT_GT(array.pages_size(), 0) << array.name();
    EXPECT_GE(array.pages(0).page_bytes(), 4096u);
    EXPECT_GT(array.pages(0).bytes(), 0u);
    EXPECT_GT(array.nodes_size(), 0) << array.name();
  }
  EXPECT_EQ(told, 2);

  const std::string table = Optctl("describe job gpt").output;
  for (const char* row :
       {"mean of 2", "  staging", "  waiting for ranks", "  norm and decision",
        "  update", "  publish", "252 B moved", " pages, node 0: "}) {
    EXPECT_TRUE(absl::StrContains(table, row)) << row << " in\n" << table;
  }
}

TEST_F(OptctlTest, DescribeComparesTheUpdateWithTheMemory) {
  const std::string record = daemon_->state_dir() + "/memory_bandwidth";
  std::ofstream(record) << "1 1000000000\n";
  const auto session = Train("gpt");
  const Ran json = Optctl("describe job gpt -o json");
  v1::Job job;
  ASSERT_TRUE(
      google::protobuf::util::JsonStringToMessage(json.output, &job).ok())
      << json.output;
  EXPECT_GT(job.memory_bytes_per_s(), 0);
  const v1::StepTimes& last = job.last_step_times();
  EXPECT_NEAR(last.memory_share() * job.memory_bytes_per_s(),
              static_cast<double>(last.update_bytes()) * 1e9 /
                  static_cast<double>(last.update_ns()),
              1);
  EXPECT_TRUE(absl::StrContains(Optctl("describe job gpt").output, "GB/s"));
}

TEST_F(OptctlTest, TablesNameWhatIsThere) {
  EXPECT_EQ(Optctl("get jobs").output, "none found\n");
  const auto session = Train("gpt");
  EXPECT_TRUE(absl::StrContains(Optctl("get jobs").output, "gpt"));
  EXPECT_TRUE(absl::StrContains(Optctl("get sessions").output, "shm"));
  const Ran params = Optctl("get params gpt -o wide");
  EXPECT_EQ(params.exit_code, kExitOk);
  EXPECT_TRUE(absl::StrContains(params.output, "weight")) << params.output;
  EXPECT_TRUE(absl::StrContains(params.output, "[2,3]")) << params.output;
  EXPECT_TRUE(absl::StrContains(Optctl("status").output, daemon_->directory()));
  EXPECT_TRUE(absl::StrContains(Optctl("version").output, "optstated"));
}

TEST_F(OptctlTest, ExitCodesSayWhatKindOfFailure) {
  const Ran missing = Optctl("describe job absent");
  EXPECT_EQ(missing.exit_code, kExitNotFound);
  EXPECT_TRUE(absl::StrContains(missing.output, "absent")) << missing.output;
  EXPECT_EQ(Optctl("describe").exit_code, kExitUsage);
  EXPECT_EQ(Optctl("get jobs -o xml").exit_code, kExitUsage);
  EXPECT_EQ(RunBinary("--endpoint nonsense status").exit_code, kExitUsage);
  const Ran nobody = RunBinary("--endpoint unix:/nonexistent.sock status");
  EXPECT_EQ(nobody.exit_code, kExitUnreachable);
  EXPECT_TRUE(absl::StrContains(nobody.output, "/nonexistent.sock"))
      << nobody.output;
}

TEST_F(OptctlTest, AVerbThatIsNoneIsNamedBesideThoseThatAre) {
  const struct {
    const char* arguments;
    const char* says;
  } wrong[] = {
      {"bogus", "\"bogus\" is nothing that optctl knows; there are: status, "},
      {"--bogus", "\"--bogus\" is nothing that optctl knows; there are: "},
      {"get bogus -o json",
       "\"bogus\" is nothing that optctl get knows; there are: jobs, sessions, "
       "params\n"},
      {"get", "optctl get: say what; there are: jobs, sessions, params\n"},
      {"get jobs bogus", "bogus"},
      {"delete job", "name is required"},
  };
  for (const auto& [arguments, says] : wrong) {
    const Ran ran = RunBinary(arguments);
    EXPECT_EQ(ran.exit_code, kExitUsage) << arguments;
    EXPECT_TRUE(absl::StrContains(ran.output, says)) << ran.output;
  }
  EXPECT_EQ(RunBinary("get --help").exit_code, kExitOk);
}

TEST_F(OptctlTest, ValuesThatAreNoneAreBadUsage) {
  for (const char* timeout : {"nan", "-nan", "inf", "-1", "0", "1e9", "x"}) {
    const Ran ran = Optctl(absl::StrCat("status --timeout=", timeout));
    EXPECT_EQ(ran.exit_code, kExitUsage) << timeout;
    EXPECT_TRUE(absl::StrContains(ran.output, timeout)) << ran.output;
  }
  for (const char* binary : {"--binary ''", "--binary="}) {
    const Ran ran = Optctl(absl::StrCat("upgrade ", binary));
    EXPECT_EQ(ran.exit_code, kExitUsage) << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, "--binary")) << ran.output;
  }
}

// A script reads the same structure from every verb.
TEST_F(OptctlTest, ThereIsAReplyWhenThereIsNothingToSay) {
  Train("gpt")->Close();
  const struct {
    const char* arguments;
    const char* reply;
  } verbs[] = {{"drain -o json", "{\n \"was_draining\": false\n}\n"},
               {"drain --resume -o yaml", "was_draining: true\n"},
               {"delete job gpt -o json", "{}\n"}};
  for (const auto& [arguments, reply] : verbs) {
    const Ran ran = Optctl(arguments);
    EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
    EXPECT_EQ(ran.output, reply) << arguments;
  }
}

// This error has its own exit code, because the daemon is there and has done
// the work.
TEST_F(OptctlTest, StdoutThatTakesNothingIsAnErrorOfItsOwn) {
  Train("gpt")->Close();
  for (const char* arguments : {"get jobs", "get jobs -o json", "drain",
                                "completion bash", "delete job gpt"}) {
    const Ran ran = OptctlToFull(arguments);
    EXPECT_EQ(ran.exit_code, kExitOther) << arguments;
    EXPECT_EQ(ran.output,
              "optctl: stdout: cannot write: No space left on device\n");
  }
  EXPECT_EQ(Optctl("describe job gpt").exit_code, kExitNotFound);
}

TEST_F(OptctlTest, DeleteIsRefusedWhileRanksAreAttached) {
  auto session = Train("gpt");
  EXPECT_EQ(Optctl("delete job gpt").exit_code, kExitRefused);
  session->Close();
  EXPECT_EQ(Optctl("delete job gpt").exit_code, kExitOk);
  EXPECT_EQ(Optctl("describe job gpt").exit_code, kExitNotFound);
}

TEST_F(OptctlTest, ForcedDeleteEndsTheSession) {
  const auto session = Train("gpt");
  EXPECT_EQ(Optctl("delete job gpt --force").exit_code, kExitOk);
  EXPECT_EQ(Optctl("describe job gpt").exit_code, kExitNotFound);
}

TEST_F(OptctlTest, OnlyAFailedJobIsRecovered) {
  const auto session = Train("gpt");
  const Ran ran = Optctl("recover gpt");
  EXPECT_EQ(ran.exit_code, kExitRefused);
  EXPECT_TRUE(absl::StrContains(ran.output, "has not failed")) << ran.output;
  EXPECT_EQ(Optctl("recover absent").exit_code, kExitNotFound);
  EXPECT_EQ(Optctl("recover").exit_code, kExitUsage);
}

// The operator sees why the job's engine cannot stay, and recovers the job.
TEST_F(OptctlTest, FailedJobIsDescribedAndRecovered) {
  const auto session = Train("gpt");
  Ran ran;
  // The job becomes FAILED at the sixth death within a minute.
  while (!absl::StrContains(ran.output, "failed")) {
    ASSERT_TRUE(daemon_->KillEngine("gpt").ok());
    ran = Optctl("describe job gpt");
    ASSERT_EQ(ran.exit_code, kExitOk) << ran.output;
  }
  // Files provide the values that no engine reports any more.
  for (const std::string text :
       {"killed by signal 9", "5 restart(s)", "/state/jobs/gpt",
        "committed step     1\n", "2 parameters, 9 elements",
        "0 of 1 attached"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
  ran = Optctl("recover gpt");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  const auto outcome = Step(*session, 2);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
}

// The job's engine runs to report the reason; the next engine finds the
// repaired file.
TEST_F(OptctlTest, JobThatCouldNotBeOpenedIsRecovered) {
  const auto session = Train("gpt");
  const std::string control =
      absl::StrCat(daemon_->state_dir(), "/jobs/gpt/state/control");
  std::filesystem::rename(control, control + ".away");
  ASSERT_TRUE(daemon_->KillEngine("gpt").ok());
  const int64_t first = AwaitFailedEngine("gpt", /*last=*/0);
  const Ran too_early = Optctl("recover gpt");
  ASSERT_EQ(too_early.exit_code, kExitOk) << too_early.output;
  AwaitFailedEngine("gpt", first);

  std::filesystem::rename(control + ".away", control);
  const Ran ran = Optctl("recover gpt");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  const auto outcome = Step(*session, 2);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(Optctl("recover gpt").exit_code, kExitRefused);
}

// Another build replaces the daemon, and the rank only waits.
TEST_F(OptctlTest, UpgradeWhileARankSteps) {
  const auto session = Train("gpt");
  const std::string binary = absl::StrCat(daemon_->directory(), "/next");
  std::filesystem::copy_file("server/optstated", binary);
  std::atomic<uint64_t> taken{1};
  std::atomic<bool> enough{false};
  std::thread rank([&] {
    while (!enough) {
      const auto outcome = Step(*session, taken + 1);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ++taken;
    }
  });
  const Ran ran =
      Optctl(absl::StrCat("upgrade --timeout 60 --binary ", binary));
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output << daemon_->Log();
  EXPECT_TRUE(absl::StrContains(ran.output, "upgrading to 0.")) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "engines replaced 1"))
      << ran.output;
  const uint64_t before = taken;
  while (taken < before + 3) std::this_thread::yield();
  enough = true;
  rank.join();
  const auto job = daemon_->GetJob("gpt");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->committed_step(), taken);
  EXPECT_EQ(std::filesystem::read_symlink(
                absl::StrCat("/proc/", job->engine_pid(), "/exe")),
            binary);
}

TEST_F(OptctlTest, UpgradeOfWhichNothingCanBeSaid) {
  const std::string binary = absl::StrCat(daemon_->directory(), "/next");
  std::filesystem::copy_file("server/optstated", binary);
  const Ran ran =
      OptctlToFull(absl::StrCat("upgrade --timeout 60 --binary ", binary));
  EXPECT_EQ(ran.exit_code, kExitOther) << ran.output;
  const auto status = daemon_->GetStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_TRUE(status->upgrade().done());
  EXPECT_EQ(status->upgrade().problems_size(), 0);
}

TEST_F(OptctlTest, UpgradeThatCannotBe) {
  EXPECT_EQ(Optctl("upgrade --binary /nonexistent").exit_code, kExitNotFound);
  const Ran ran = Optctl("upgrade --binary /bin/true");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "no optstated")) << ran.output;
}

TEST_F(OptctlTest, DrainRefusesNewSessionsUntilResumed) {
  ASSERT_NE(Train("first"), nullptr);
  ASSERT_EQ(Optctl("drain").exit_code, kExitOk);
  EXPECT_TRUE(
      absl::StrContains(Optctl("status -o yaml").output, "draining: true"));
  client::SessionOptions options;
  options.endpoint = daemon_->shm_endpoint();
  options.job = "second";
  options.layout.groups.resize(1);
  options.layout.parameters = {{"weight", {1}, 1}};
  EXPECT_EQ(Session::Open(options).status().code(),
            absl::StatusCode::kUnavailable);
  ASSERT_EQ(Optctl("drain --resume").exit_code, kExitOk);
  EXPECT_NE(Train("second"), nullptr);
}

TEST_F(OptctlTest, DrainOfAStoppedEngineSaysWhatIsInForce) {
  const auto session = Train("gpt");
  const Process engine = StopEngine("gpt");
  const Ran drained = Optctl("--timeout 1 drain");
  EXPECT_EQ(drained.exit_code, kExitUnreachable) << drained.output;
  for (const char* text :
       {"draining stays in force", "job \"gpt\"", "`optctl drain --resume`"}) {
    EXPECT_TRUE(absl::StrContains(drained.output, text)) << drained.output;
  }
  EXPECT_TRUE(
      absl::StrContains(Optctl("status -o yaml").output, "draining: true"));
  const Ran resumed = Optctl("--timeout 1 drain --resume");
  EXPECT_EQ(resumed.exit_code, kExitUnreachable) << resumed.output;
  for (const char* text : {"draining has ended", "job \"gpt\""}) {
    EXPECT_TRUE(absl::StrContains(resumed.output, text)) << resumed.output;
  }
  engine.Signal(SIGCONT);
  const Ran again = Optctl("drain --resume");
  EXPECT_EQ(again.exit_code, kExitOk) << again.output;
  EXPECT_TRUE(absl::StrContains(again.output, "it was not draining"))
      << again.output;
}

// A program listens there and sends nothing: optctl waits for one --timeout,
// for every verb, and says what it waited for.
TEST_F(OptctlTest, ASilentPortIsSaidAfterOneTimeout) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size),
            0);
  ASSERT_EQ(::listen(listener.get(), 16), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address),
                          &size),
            0);
  for (const char* verb : {"drain", "status"}) {
    const Ran ran = RunBinary(
        absl::StrCat("--endpoint grpc:127.0.0.1:", ntohs(address.sin_port),
                     " --timeout 0.5 ", verb));
    EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
    EXPECT_TRUE(absl::StrContains(
        ran.output, "no answer within 500ms (--timeout): nobody spoke gRPC"))
        << ran.output;
  }
  // A stopped daemon also sends nothing.
  daemon_->process().Signal(SIGSTOP);
  const Ran stopped = Optctl("--timeout 0.5 drain");
  daemon_->process().Signal(SIGCONT);
  EXPECT_EQ(stopped.exit_code, kExitUnreachable) << stopped.output;
  EXPECT_TRUE(absl::StrContains(stopped.output, "The daemon is stopped"))
      << stopped.output;
}

TEST_F(OptctlTest, WithoutADaemonItSaysWhereItLookedAndWhatToDo) {
  if (std::filesystem::exists("/run/optstate/optstated.sock")) {
    GTEST_SKIP() << "this node has a daemon";
  }
  const std::string runtime = daemon_->directory() + "/run";
  const std::string nowhere =
      absl::StrCat("env -u OPTSTATE_ENDPOINT XDG_RUNTIME_DIR=", runtime,
                   " client/ctl/optctl status 2>&1");
  Ran ran = RunCommand(nowhere);
  EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
  for (const std::string& text :
       {std::string("no daemon was found on this node"),
        std::string("/run/optstate/optstated.sock ("),
        runtime + "/optstate/optstated.sock (no such file)",
        std::string("Start one (optstated)"), std::string("--endpoint"),
        std::string("$OPTSTATE_ENDPOINT"), std::string("unix:PATH")}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
  const Ran embedded = RunBinary("--endpoint embedded status");
  EXPECT_EQ(embedded.exit_code, kExitUsage) << embedded.output;
  // This daemon was named explicitly.
  ran = RunBinary("--endpoint unix:/nonexistent.sock drain");
  for (const char* text :
       {"unix:/nonexistent.sock", "no daemon answers there", "No such file",
        "optstated --socket /nonexistent.sock", "$OPTSTATE_ENDPOINT"}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }
}

// Cut to whole seconds the wait would be 0.
TEST_F(OptctlTest, DrainWaitsForAFractionOfASecond) {
  ASSERT_NE(Train("gpt"), nullptr);
  const Ran ran = Optctl("--timeout 0.99 drain");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
}

TEST_F(OptctlTest, CompletionScriptsParse) {
  EXPECT_EQ(RunBinary("completion bash | bash -n").exit_code, 0);
  const Ran completed = RunBinary(
      "completion bash > $TEST_TMPDIR/c && bash -c '. $TEST_TMPDIR/c; "
      "COMP_WORDS=(optctl get p) COMP_CWORD=2; _optctl; "
      "echo \"${COMPREPLY[@]}\"'");
  EXPECT_EQ(completed.output, "params\n");
}

TEST_F(OptctlTest, CompletionKnowsShellsAndTheEndpointThatWasTyped) {
  const auto session = Train("gpt");
  const std::string path = daemon_->socket();
  const struct {
    std::string words;  // as readline splits them
    const char* offers;
  } typed[] = {
      {"completion ''", "--help bash zsh fish\n"},
      {absl::StrCat("--endpoint unix : ", path, " describe job g"), "gpt\n"},
      {absl::StrCat("--endpoint = unix : ", path, " describe job g"), "gpt\n"},
      {absl::StrCat("--endpoint=unix:", path, " describe job g"), "gpt\n"},
      {absl::StrCat("describe job --endpoint grpc : unix : ", path, " g"),
       "gpt\n"},
      {"describe job g", "\n"},
  };
  for (const auto& [words, offers] : typed) {
    const Ran completed = RunBinary(absl::StrCat(
        "completion bash > $TEST_TMPDIR/c && bash -c '. $TEST_TMPDIR/c; "
        "optctl() { client/ctl/optctl \"$@\"; }; "
        "export OPTSTATE_ENDPOINT=unix:/nonexistent; COMP_WORDS=(optctl ",
        absl::StrReplaceAll(words, {{"'", "\""}}),
        "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _optctl; "
        "echo \"${COMPREPLY[@]}\"'"));
    EXPECT_EQ(completed.output, offers) << words;
  }
}

}  // namespace
}  // namespace optstate::ctl
