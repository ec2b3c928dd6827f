// Tests what optctl's output and exit codes tell a script.

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "gtest/gtest.h"
#include "optstate/v1/engine.grpc.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {
namespace {

using OptctlUsageTest = OptctlTest;

TEST_F(OptctlUsageTest, ExitCodesSayWhatKindOfFailure) {
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

TEST_F(OptctlUsageTest, AVerbThatIsNoneIsNamedBesideThoseThatAre) {
  const struct {
    const char* arguments;
    const char* says;
  } wrong[] = {
      {"bogus", "\"bogus\" is nothing that optctl knows; there are: status, "},
      {"--bogus", "\"--bogus\" is nothing that optctl knows; there are: "},
      {"get bogus -o json",
       "\"bogus\" is nothing that optctl get knows; there are: jobs, sessions, "
       "devices, users, quotas, params\n"},
      {"get",
       "optctl get: say what; there are: jobs, sessions, devices, users, "
       "quotas, params\n"},
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

TEST_F(OptctlUsageTest, ValuesThatAreNoneAreBadUsage) {
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
TEST_F(OptctlUsageTest, ThereIsAReplyWhenThereIsNothingToSay) {
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
TEST_F(OptctlUsageTest, StdoutThatTakesNothingIsAnErrorOfItsOwn) {
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

// A listening socket of the loopback that is no daemon's.
struct Port {
  Port() : listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener.get(), generic, size), 0);
    EXPECT_EQ(::listen(listener.get(), 16), 0);
    EXPECT_EQ(::getsockname(listener.get(), generic, &size), 0);
    endpoint = absl::StrCat("grpc:127.0.0.1:", ntohs(address.sin_port));
  }
  UniqueFd listener;
  std::string endpoint;
};

// A program listens there and sends nothing: optctl waits for one --timeout,
// for every verb, and says what it waited for.
TEST_F(OptctlUsageTest, ASilentPortIsSaidAfterOneTimeout) {
  const Port port;
  for (const char* verb : {"drain", "status"}) {
    const Ran ran = RunBinary(
        absl::StrCat("--endpoint ", port.endpoint, " --timeout 0.5 ", verb));
    EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
    EXPECT_TRUE(absl::StrContains(
        ran.output,
        absl::StrCat(
            port.endpoint,
            ": no answer within 500ms (--timeout): nobody spoke gRPC")))
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

// A server speaks gRPC and answers nothing: the connection and the answer have
// one --timeout together, also where the daemon is asked to wait.
TEST_F(OptctlUsageTest, AServerThatDoesNotAnswerIsSaidAfterOneTimeout) {
  const Port port;
  for (const char* verb : {"drain", "drain --resume", "status"}) {
    std::thread server([&port] {
      const UniqueFd peer(
          ::accept4(port.listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      constexpr char kEmptySettings[] = {0, 0, 0, 4, 0, 0, 0, 0, 0};
      EXPECT_EQ(::write(peer.get(), kEmptySettings, sizeof(kEmptySettings)),
                static_cast<ssize_t>(sizeof(kEmptySettings)));
      char ignored[4096];
      while (::read(peer.get(), ignored, sizeof(ignored)) > 0) {
      }
    });
    const Ran ran = RunBinary(
        absl::StrCat("--endpoint ", port.endpoint, " --timeout 2 ", verb));
    server.join();
    EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
    EXPECT_TRUE(absl::StrContains(
        ran.output, absl::StrCat(port.endpoint,
                                 ": the daemon is there and gave no answer "
                                 "within 2s (--timeout)")))
        << ran.output;
  }
}

// A server of gRPC that has none of the daemon's calls, as an older daemon has
// none of the latest ones.
TEST_F(OptctlUsageTest, ACallThatTheDaemonDoesNotKnowHasAnExitCodeOfItsOwn) {
  v1::Engine::Service another;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                           &port);
  builder.RegisterService(&another);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  for (const char* arguments :
       {"status", "events", "verify gpt", "trace gpt", "sleep gpt"}) {
    const Ran ran = RunBinary(
        absl::StrCat("--endpoint grpc:127.0.0.1:", port, " ", arguments));
    EXPECT_EQ(ran.exit_code, kExitOlderDaemon) << arguments << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, "older")) << ran.output;
    EXPECT_TRUE(absl::StrContains(ran.output, "upgrade")) << ran.output;
  }
  server->Shutdown();
}

TEST_F(OptctlUsageTest, WithoutADaemonItSaysWhereItLookedAndWhatToDo) {
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

}  // namespace
}  // namespace optstate::ctl
