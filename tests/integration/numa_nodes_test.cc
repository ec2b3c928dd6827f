// Tests a job on a machine of several NUMA nodes. deploy/test-numa makes one.

#include <dirent.h>

#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/client.h"
#include "client/fake/fake_channel.h"
#include "client/fake/fake_daemon.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/workers/cpu_topology.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {
namespace {

using client::Session;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr char kJob[] = "job";

class NumaNodesTest : public testing::Test {
 protected:
  void SetUp() override {
    if (nodes_.size() < 2) {
      GTEST_SKIP() << "one NUMA node; deploy/test-numa has two";
    }
    auto daemon = TestDaemon::Start();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    client::SessionOptions options = NewJob(layout_);
    options.endpoint = daemon_->shm_endpoint();
    options.job = kJob;
    session_ = Open(std::move(options));
    ASSERT_NE(session_, nullptr);
    model_session_ = OpenModel();
    for (Session* each : {session_.get(), model_session_.get()}) {
      ASSERT_TRUE(script_.Load(*each).ok());
    }
  }

  static std::unique_ptr<Session> Open(client::SessionOptions options) {
    auto session = Session::Open(std::move(options));
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  std::unique_ptr<Session> OpenModel() {
    return *Session::OpenOver(
        [&](client::ChannelSetup setup) {
          return client::MakeFakeChannel(&model_, std::move(setup));
        },
        NewJob(layout_));
  }

  // Takes a step on the daemon and on a model that knows no nodes.
  void TakeStep(uint64_t step) {
    for (Session* each : {session_.get(), model_session_.get()}) {
      const auto outcome = script_.Run(*each, step);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
    }
  }
  void ExpectBitsOfTheModel() {
    const auto a = Snapshot(*session_);
    const auto b = Snapshot(*model_session_);
    ASSERT_TRUE(a.ok()) << a.status();
    ASSERT_TRUE(b.ok()) << b.status();
    EXPECT_EQ(FirstDifference(*a, *b), "");
  }

  v1::Job Describe() {
    const auto job = daemon_->GetJob(kJob, /*memory=*/true);
    EXPECT_TRUE(job.ok()) << job.status();
    return job.ok() ? *job : v1::Job();
  }
  // Returns the processors that each thread of the engine may run on.
  std::vector<std::vector<int>> MasksOf(int64_t engine) {
    std::vector<std::vector<int>> masks;
    const std::string tasks = absl::StrCat("/proc/", engine, "/task");
    DIR* const directory = ::opendir(tasks.c_str());
    EXPECT_NE(directory, nullptr) << tasks;
    while (const dirent* entry = directory ? ::readdir(directory) : nullptr) {
      std::ifstream status(absl::StrCat(tasks, "/", entry->d_name, "/status"));
      for (std::string line; std::getline(status, line);) {
        absl::string_view list = line;
        if (!absl::ConsumePrefix(&list, "Cpus_allowed_list:\t")) continue;
        masks.push_back(scheduler::ParseCpuList(list));
      }
    }
    if (directory != nullptr) ::closedir(directory);
    return masks;
  }

  // Expects workers to be spread over the nodes, and what they own to be where
  // they are.
  void ExpectSpread() {
    const v1::Job job = Describe();
    const auto masks = MasksOf(job.engine_pid());
    for (const scheduler::CpuNode& node : nodes_) {
      EXPECT_THAT(masks, Contains(node.cpus));
    }
    EXPECT_THAT(daemon_->Log(),
                HasSubstr(absl::StrCat("bound to their NUMA node, of ",
                                       nodes_.size())));
    int arrays = 0;
    for (const v1::ArrayBytes& array : job.arrays()) {
      if (array.bytes() < kLayoutBytes) continue;  // no array of the elements
      std::map<int, uint64_t> bytes;
      for (const v1::NodeBytes& each : array.nodes()) {
        bytes[static_cast<int>(each.node())] = each.bytes();
      }
      for (const scheduler::CpuNode& node : nodes_) {
        // The ranges' ends are rounded to 2 MiB.
        EXPECT_GT(bytes[node.node], array.bytes() / nodes_.size() / 2)
            << array.name() << " on node " << node.node;
      }
      ++arrays;
    }
    EXPECT_GE(arrays, 3);
  }

  static constexpr uint64_t kNumel = uint64_t{1} << 20;
  static constexpr uint64_t kLayoutBytes = 4 * kNumel * sizeof(float);

  const std::vector<scheduler::CpuNode> nodes_ =
      scheduler::NodesBelow("", scheduler::AllowedCpus());
  const LayoutSpec layout_ = UniformLayout(4, kNumel);
  const StepScript script_{*Layout::Make(layout_), ScriptSeed()};
  client::FakeDaemon model_;
  std::unique_ptr<TestDaemon> daemon_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Session> model_session_;
};

TEST_F(NumaNodesTest, StateIsWhereItsWorkersAreAndTheBitsAreTheSame) {
  TakeStep(1);
  ExpectSpread();
  TakeStep(2);
  ExpectBitsOfTheModel();
}

TEST_F(NumaNodesTest, AlsoInTheNextEngine) {
  TakeStep(1);
  ASSERT_TRUE(daemon_->KillEngine(kJob).ok());
  TakeStep(2);
  ExpectSpread();
  ExpectBitsOfTheModel();
}

}  // namespace
}  // namespace optstate
