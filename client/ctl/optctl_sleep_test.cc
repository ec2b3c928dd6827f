// optctl sleep and wake, against a real daemon with a real disk.

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using client::StateArray;

class OptctlSleepTest : public OptctlTest {
 protected:
  void SetUp() override {
    disk_ = testing::TempDir() + "/optctl_sleep-XXXXXX";
    ASSERT_NE(::mkdtemp(disk_.data()), nullptr);
    TestDaemon::Options options;
    options.flags = {"--nvme-dir=" + disk_};
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  void TearDown() override {
    daemon_ = nullptr;
    std::filesystem::remove_all(disk_);
  }

  // Fetches the masters of the first parameter.
  static std::vector<float> Masters(client::Session& session) {
    std::vector<float> masters(6);
    EXPECT_TRUE(
        session
            .Fetch(StateArray::kMaster, 0,
                   absl::MakeSpan(reinterpret_cast<std::byte*>(masters.data()),
                                  24))
            .ok());
    return masters;
  }

  void Contains(const Ran& ran, const std::string& text) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << ran.output;
  }

  std::string disk_;
};

TEST_F(OptctlSleepTest, AJobSleepsAndWakesBitEqual) {
  auto session = Train("gpt");
  Ran ran = Optctl("sleep gpt");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  Contains(ran, "1 ranks are attached: 0 (pid ");
  const std::vector<float> before = Masters(*session);
  session->Close();
  session = nullptr;
  ran = Optctl("sleep gpt");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  Contains(ran, "job gpt is asleep in " + disk_ + "/asleep/jobs/gpt: ");
  ran = Optctl("get jobs");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  Contains(ran, "asleep");
  ran = Optctl("describe job gpt");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  Contains(ran, disk_ + "/asleep/jobs/gpt");
  for (const char* verb : {"sleep gpt", "recover gpt", "verify gpt",
                           "set job gpt host_budget=1GiB", "get params gpt"}) {
    ran = Optctl(verb);
    EXPECT_EQ(ran.exit_code, kExitRefused) << verb << ": " << ran.output;
    Contains(ran, "asleep");
  }
  ran = Optctl("wake gpt -o json");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  Contains(ran, "\"done\": true");
  client::SessionOptions options;
  options.endpoint = daemon_->shm_endpoint();
  options.job = "gpt";
  options.layout.groups.resize(1);
  options.layout.parameters = {{"weight", {2, 3}, 6}, {"bias", {3}, 3}};
  auto again = client::Session::Open(options);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(Masters(**again), before);
  const auto outcome = Step(**again, 2);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  ran = Optctl("wake gpt");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  Contains(ran, "not asleep");
}

TEST_F(OptctlSleepTest, DamageIsExitCodeSix) {
  auto session = Train("gpt");
  session->Close();
  session = nullptr;
  ASSERT_EQ(Optctl("sleep gpt").exit_code, kExitOk);
  const std::string file = disk_ + "/asleep/jobs/gpt/files/state/job.binpb";
  std::fstream(file, std::ios::in | std::ios::out) << "damage";
  Ran ran = Optctl("wake gpt");
  EXPECT_EQ(ran.exit_code, kExitDamaged) << ran.output;
  Contains(ran, file);
  EXPECT_EQ(Optctl("delete job gpt").exit_code, kExitOk);
  EXPECT_FALSE(std::filesystem::exists(disk_ + "/asleep/jobs/gpt"));
  EXPECT_EQ(Optctl("wake gpt").exit_code, kExitNotFound);
  EXPECT_EQ(Optctl("sleep").exit_code, kExitUsage);
}

}  // namespace
}  // namespace optstate::ctl
