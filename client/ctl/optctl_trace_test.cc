// optctl trace, against a real daemon.

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file),
          std::istreambuf_iterator<char>()};
}

// A trace file, read by a parser that is not ours.
struct TraceFile {
  explicit TraceFile(const std::string& path) {
    const std::string json = ReadFile(path);
    Struct trace;
    is_json = google::protobuf::util::JsonStringToMessage(json, &trace).ok();
    EXPECT_TRUE(is_json) << json;
    if (!is_json) return;
    const auto& values = trace.fields().at("traceEvents").list_value().values();
    for (const Value& value : values) {
      const auto& event = value.struct_value().fields();
      if (event.at("ph").string_value() != "X") continue;
      ++spans;
      names.insert(event.at("cat").string_value() + "/" +
                   event.at("name").string_value());
      const auto& arguments = event.at("args").struct_value().fields();
      const auto step = arguments.find("step");
      if (step == arguments.end()) continue;
      steps.insert(static_cast<uint64_t>(step->second.number_value()));
    }
    const auto& other = trace.fields().at("otherData").struct_value().fields();
    is_complete = other.at("complete").bool_value();
  }

  bool is_json = false;
  bool is_complete = false;
  int spans = 0;
  std::set<std::string> names;  // "group/span"
  std::set<uint64_t> steps;
};

class OptctlTraceTest : public OptctlTest {
 protected:
  void SetUp() override {
    OptctlTest::SetUp();
    folder_ = testing::TempDir() + "/optctl_trace-XXXXXX";
    ASSERT_NE(::mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override {
    daemon_ = nullptr;
    std::filesystem::remove_all(folder_);
  }
  std::string File(const std::string& name = "trace.json") const {
    return folder_ + "/" + name;
  }

  // Runs a shell's command line, and takes steps until it has ended.
  Ran RunWhileTraining(client::Session* session, const std::string& command) {
    std::atomic<bool> has_ended = false;
    Ran ran;
    std::thread runner([&] {
      ran = RunCommand(command);
      has_ended = true;
    });
    while (!has_ended) {
      const auto outcome = Step(*session, next_step_++);
      EXPECT_TRUE(outcome.ok()) << outcome.status();
      if (!outcome.ok()) break;
    }
    runner.join();
    return ran;
  }
  // Runs optctl, which traces more steps than are taken, until it has written
  // the beginning of its file, then `act` with its pid.
  template <typename Act>
  Ran TraceUntil(Act act) {
    const std::string pid_file = File("pid");
    Ran ran;
    std::thread optctl([&] {
      ran = RunCommand(absl::StrCat(
          "client/ctl/optctl ", AtDaemon("trace gpt --steps 1000 -o " + File()),
          " 2>&1 & echo $! > ", pid_file, "; wait $!"));
    });
    while (!absl::StrContains(ReadFile(File()), "traceEvents")) {
      std::this_thread::yield();
    }
    pid_t pid = 0;
    while (pid == 0) std::ifstream(pid_file) >> pid;
    act(pid);
    optctl.join();
    return ran;
  }

  std::string folder_;
  uint64_t next_step_ = 2;  // Train() takes the first one
};

TEST_F(OptctlTraceTest, StdoutHasTheTraceAndStderrTheProgress) {
  const auto session = Train("gpt");
  const Ran ran = RunWhileTraining(
      session.get(),
      absl::StrCat("client/ctl/optctl ", AtDaemon("trace gpt --steps 3"), " > ",
                   File(), " 2> ", File("stderr")));
  const std::string said = ReadFile(File("stderr"));
  EXPECT_EQ(ran.exit_code, kExitOk) << said;
  EXPECT_TRUE(absl::StrContains(said, "traced job gpt: 3 of 3 steps, "))
      << said;
  EXPECT_TRUE(absl::StrContains(said, "ui.perfetto.dev")) << said;
  const TraceFile trace(File());
  EXPECT_TRUE(trace.is_complete);
  EXPECT_EQ(trace.steps.size(), 3u);
  for (const char* name : {"steps/update", "steps/decide", "ranks/push",
                           "workers/update", "workers/staging"}) {
    EXPECT_TRUE(trace.names.contains(name)) << name;
  }
}

// A pager reads one screen, and the rest when it is asked to: that takes
// longer than the daemon may be silent. The time that it takes is what this is
// about.
TEST_F(OptctlTraceTest, AReaderMayTakeItsTime) {
  const auto session = Train("gpt");
  RunWhileTraining(
      session.get(),
      absl::StrCat("{ client/ctl/optctl ",
                   AtDaemon("--timeout 3 trace gpt --steps 300"), " 2> ",
                   File("stderr"), "; echo $? > ", File("code"),
                   "; } | { sleep 6; cat > ", File(), "; }"));
  EXPECT_EQ(ReadFile(File("code")), "0\n") << ReadFile(File("stderr"));
  // It is more than a pipe holds, so that it has to wait for the reader.
  EXPECT_GT(std::filesystem::file_size(File()), 65536u);
  const TraceFile trace(File());
  EXPECT_TRUE(trace.is_complete);
  EXPECT_EQ(trace.steps.size(), 300u);
}

TEST_F(OptctlTraceTest, AFileIsNeverWrittenOver) {
  const auto session = Train("gpt");
  const std::string command =
      absl::StrCat("client/ctl/optctl ",
                   AtDaemon("trace gpt --steps 1 -o " + File()), " 2>&1");
  Ran ran = RunWhileTraining(session.get(), command);
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_EQ(TraceFile(File()).steps.size(), 1u);
  ran = RunCommand(command);
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "not written over")) << ran.output;
  EXPECT_TRUE(TraceFile(File()).is_complete);
}

TEST_F(OptctlTraceTest, WhatCannotBeTraced) {
  const auto session = Train("gpt");
  EXPECT_EQ(Optctl("trace absent -o " + File()).exit_code, kExitNotFound);
  EXPECT_FALSE(std::filesystem::exists(File()));
  for (const char* arguments :
       {"trace", "trace gpt --steps 0", "trace gpt --steps 1001",
        "trace gpt --steps x", "trace gpt -o json", "-o json trace gpt"}) {
    const Ran ran = Optctl(arguments);
    EXPECT_EQ(ran.exit_code, kExitUsage) << arguments << ": " << ran.output;
  }
  EXPECT_FALSE(std::filesystem::exists("json"));
}

TEST_F(OptctlTraceTest, ATerminalIsNoPlaceForIt) {
  const auto session = Train("gpt");
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (terminal < 0) GTEST_SKIP() << "this machine gives no pseudo-terminals";
  ASSERT_EQ(::grantpt(terminal), 0);
  ASSERT_EQ(::unlockpt(terminal), 0);
  const Ran ran =
      RunCommand(absl::StrCat("client/ctl/optctl ", AtDaemon("trace gpt"),
                              " 2>&1 > ", ::ptsname(terminal)));
  ::close(terminal);
  EXPECT_EQ(ran.exit_code, kExitUsage) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "to a terminal")) << ran.output;
}

TEST_F(OptctlTraceTest, ASecondTraceIsRefused) {
  const auto session = Train("gpt");
  const Ran ran = TraceUntil([this](pid_t optctl) {
    const Ran second = Optctl("trace gpt -o " + File("second"));
    EXPECT_EQ(second.exit_code, kExitRefused) << second.output;
    EXPECT_TRUE(absl::StrContains(second.output, "another trace"))
        << second.output;
    EXPECT_FALSE(std::filesystem::exists(File("second")));
    ::kill(optctl, SIGTERM);
  });
  EXPECT_EQ(ran.exit_code, kExitCancelled) << ran.output;
}

TEST_F(OptctlTraceTest, CtrlCLeavesWhatCanBeRead) {
  const auto session = Train("gpt");
  const Ran ran = TraceUntil([&](pid_t optctl) {
    const auto outcome = Step(*session, next_step_++);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    while (!absl::StrContains(ReadFile(File()), "\"publish\"")) {
      std::this_thread::yield();
    }
    ::kill(optctl, SIGINT);
  });
  EXPECT_EQ(ran.exit_code, kExitCancelled) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "interrupted")) << ran.output;
  const TraceFile trace(File());
  EXPECT_FALSE(trace.is_complete);
  EXPECT_EQ(trace.steps, std::set<uint64_t>{2});
  // The engine has noticed it: the next trace begins. Until then it is refused.
  const std::string command =
      absl::StrCat("client/ctl/optctl ", AtDaemon("trace gpt --steps 1"), " > ",
                   File("next"), " 2> ", File("stderr"));
  Ran next;
  do {
    next = RunWhileTraining(session.get(), command);
  } while (next.exit_code == kExitRefused);
  EXPECT_EQ(next.exit_code, kExitOk) << ReadFile(File("stderr"));
  EXPECT_TRUE(TraceFile(File("next")).is_complete);
}

TEST_F(OptctlTraceTest, AnEngineThatDiesLeavesWhatCanBeRead) {
  const auto session = Train("gpt");
  const Ran ran = TraceUntil([this](pid_t /*optctl*/) {
    EXPECT_TRUE(daemon_->KillEngine("gpt").ok());
  });
  EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "engine of job \"gpt\""))
      << ran.output;
  EXPECT_FALSE(TraceFile(File()).is_complete);
}

TEST_F(OptctlTraceTest, ADaemonThatDiesLeavesWhatCanBeRead) {
  const auto session = Train("gpt");
  const Ran ran = TraceUntil(
      [this](pid_t /*optctl*/) { EXPECT_TRUE(daemon_->Kill().ok()); });
  EXPECT_EQ(ran.exit_code, kExitUnreachable) << ran.output;
  EXPECT_FALSE(TraceFile(File()).is_complete);
}

TEST_F(OptctlTraceTest, AFullDiskIsSaid) {
  const auto session = Train("gpt");
  const Ran ran = OptctlToFull("trace gpt");
  EXPECT_EQ(ran.exit_code, kExitOther) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "stdout")) << ran.output;
}

}  // namespace
}  // namespace optstate::ctl
