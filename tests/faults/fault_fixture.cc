#include "tests/faults/fault_fixture.h"

#include <signal.h>

#include <atomic>
#include <fstream>
#include <iostream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/fake/fake_channel.h"
#include "client/fake/fake_daemon.h"
#include "storage/format/control_file.h"
#include "tests/crash/find_engine.h"
#include "tests/crash/poll_until.h"
#include "tests/crash/shared_page.h"
#include "tests/faults/process_state.h"

namespace optstate::faults {

using client::Session;

void FaultTest::TearDown() {
  if (HasFailure() && daemon_ != nullptr) std::cerr << daemon_->Log();
}

void FaultTest::StartDaemon(TestDaemon::Options options) {
  auto daemon = TestDaemon::Start(std::move(options));
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = *std::move(daemon);
}

std::string FaultTest::endpoint() const {
  return wire_ == Wire::kShm ? daemon_->shm_endpoint()
                             : daemon_->grpc_endpoint();
}

client::SessionOptions FaultTest::Options(uint32_t rank,
                                          uint32_t world_size) const {
  client::SessionOptions options;
  options.endpoint = endpoint();
  options.job = "job";
  options.layout = layout_;
  options.rank = rank;
  options.world_size = world_size;
  return options;
}

std::unique_ptr<Session> FaultTest::Open(client::SessionOptions options) const {
  auto session = Session::Open(std::move(options));
  EXPECT_TRUE(session.ok()) << session.status();
  return session.ok() ? *std::move(session) : nullptr;
}

std::unique_ptr<RankProcess> FaultTest::StartRank(uint32_t rank,
                                                  uint32_t world_size,
                                                  const std::string& at) const {
  auto process = RankProcess::Start({.endpoint = at.empty() ? endpoint() : at,
                                     .daemon_path = "",
                                     .job = "job",
                                     .rank = rank,
                                     .world_size = world_size,
                                     .seed = seed_});
  EXPECT_TRUE(process.ok()) << process.status();
  return process.ok() ? *std::move(process) : nullptr;
}

void FaultTest::RunSteps(Session& session, uint64_t first,
                         uint64_t last) const {
  for (uint64_t step = first; step <= last; ++step) {
    const auto outcome = Script().Run(session, step);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(outcome->step, step);
  }
}

void FaultTest::ExpectUndisturbed(Session& session, uint64_t steps) const {
  client::FakeDaemon model;
  auto expected = Session::OpenOver(
      [&](client::ChannelSetup setup) {
        return client::MakeFakeChannel(&model, std::move(setup));
      },
      NewJob(layout_));
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_TRUE(Script().Load(**expected).ok());
  RunSteps(**expected, 1, steps);
  const auto a = Snapshot(session);
  const auto b = Snapshot(**expected);
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ(FirstDifference(*a, *b), "");
}

pid_t FaultTest::engine() const {
  return crash::FindEngine(daemon_->process().pid(), "job");
}

void FaultTest::KillEngineInsideStep(Session& session, uint64_t first,
                                     uint64_t* last) const {
  const Process process(engine());
  const auto page = crash::SharedPage::Map(JobDirectory() + "/state/control",
                                           crash::SharedPage::Access::kRead);
  ASSERT_TRUE(page.ok()) << page.status();
  const auto& control = *static_cast<const storage::ControlFile*>(page->data());
  std::atomic<bool> enough{false};
  std::atomic<bool> failed{false};
  std::thread stepping([&] {
    for (*last = first;; ++*last) {
      RunSteps(session, *last, *last);
      failed.store(testing::Test::HasFatalFailure());
      if (enough.load() || failed.load()) return;
    }
  });
  const absl::Status caught = crash::PollUntil("a step being applied", [&] {
    if (failed.load()) return true;
    if (control.step_in_progress.load() == 0) return false;
    process.Signal(SIGSTOP);
    while (process.running() && !IsStopped(process.pid())) {
      std::this_thread::yield();
    }
    if (control.step_in_progress.load() != 0) return true;
    process.Signal(SIGCONT);
    return false;
  });
  enough.store(true);
  process.Signal(SIGKILL);
  stepping.join();
  ASSERT_TRUE(caught.ok()) << caught;
  EXPECT_EQ(control.steps_recovered, 1);
}

size_t FaultTest::TimesLogged(absl::string_view text) const {
  std::ifstream file(daemon_->directory() + "/log");
  size_t times = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.find(std::string(text)) != std::string::npos) ++times;
  }
  return times;
}

std::string WireName(const testing::TestParamInfo<Wire>& wire) {
  return wire.param == Wire::kShm ? "Shm" : "Grpc";
}

LayoutSpec LargeLayout() { return UniformLayout(4, 1 << 17); }

std::string OneWorker() { return "engine:\n  workers: 1\n"; }

}  // namespace optstate::faults
