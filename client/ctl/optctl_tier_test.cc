// optctl describe tier, against a real daemon with two directories on a disk.

#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>

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

namespace fs = std::filesystem;

class OptctlTierTest : public OptctlTest {
 protected:
  void SetUp() override {
    disk_ = testing::TempDir() + "/optctl_tier-XXXXXX";
    ASSERT_NE(::mkdtemp(disk_.data()), nullptr);
    for (const char* name : {"/a", "/b"}) {
      ASSERT_TRUE(fs::create_directory(disk_ + name));
    }
    Start("directory_weights: [3, 1], host_budget_bytes: 16 MiB");
  }
  void TearDown() override {
    daemon_ = nullptr;
    fs::remove_all(disk_);
  }

  void Start(const std::string& settings) {
    daemon_ = nullptr;
    TestDaemon::Options options;
    options.config = absl::StrCat("engine: {subgroup_elements: 262144}\n",
                                  "nvme: {", "directories: [", disk_, "/a, ",
                                  disk_, "/b], ", settings, "}\n");
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  v1::DescribeTiersReply Tiers(const std::string& arguments = "") const {
    const Ran ran = Optctl(absl::StrCat("describe tier -o json ", arguments));
    EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
    v1::DescribeTiersReply reply;
    EXPECT_TRUE(
        google::protobuf::util::JsonStringToMessage(ran.output, &reply).ok())
        << ran.output;
    return reply;
  }
  static client::StorageOptions OnDisk(uint64_t budget = 0) {
    client::StorageOptions storage;
    storage.placement = client::Placement::kNvme;
    storage.host_budget_bytes = budget;
    return storage;
  }

  std::string disk_;
};

TEST_F(OptctlTierTest, MemoryAndDirectoriesAreDescribedWithTheirJobs) {
  const auto session = Train("gpt", OnDisk(20 << 20));
  const Ran ran = Optctl("describe tier");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  for (const std::string& text :
       {std::string("budget for frames   16.0 MiB"), disk_ + "/a",
        std::string("not measured"), std::string("job gpt"),
        std::string("weight 3")}) {
    EXPECT_TRUE(absl::StrContains(ran.output, text)) << text << ran.output;
  }
  EXPECT_FALSE(absl::StrContains(ran.output, "auto,")) << ran.output;
  const v1::DescribeTiersReply tiers = Tiers();
  EXPECT_GT(tiers.memory().frames_bytes(), 0u);
  EXPECT_LE(tiers.memory().frames_bytes(), tiers.memory().used_bytes());
  ASSERT_EQ(tiers.memory().jobs_size(), 1);
  ASSERT_EQ(tiers.directories_size(), 2);
  for (const v1::DirectoryTier& one : tiers.directories()) {
    EXPECT_GT(one.capacity_bytes(), one.used_bytes());
    EXPECT_GT(one.used_bytes(), 0u);
    ASSERT_EQ(one.jobs_size(), 1);
    EXPECT_EQ(one.jobs(0).job(), "gpt");
    EXPECT_EQ(one.jobs(0).weight(), one.weight());
  }
  EXPECT_EQ(tiers.directories(0).weight(), 3u);
  EXPECT_EQ(tiers.directories(1).weight(), 1u);
  const Ran described = Optctl("describe job gpt");
  EXPECT_TRUE(absl::StrContains(described.output, "/a/jobs/gpt, weight 3"))
      << described.output;
}

TEST_F(OptctlTierTest, DirectoriesAreMeasuredOnRequestAndStayKnown) {
  EXPECT_EQ(Tiers().directories(1).mixed_bytes_per_s(), 0);
  const v1::DescribeTiersReply measured = Tiers("--measure --timeout 60");
  for (const v1::DirectoryTier& one : measured.directories()) {
    EXPECT_GT(one.read_bytes_per_s(), 0);
    EXPECT_GT(one.write_bytes_per_s(), 0);
    EXPECT_GT(one.mixed_bytes_per_s(), 0);
    EXPECT_EQ(one.problem(), "");
  }
  EXPECT_EQ(Tiers().directories(1).mixed_bytes_per_s(),
            measured.directories(1).mixed_bytes_per_s());
  // Not half of it: a disk that has gone is said.
  fs::remove_all(disk_ + "/b");
  const v1::DescribeTiersReply gone = Tiers("--measure --timeout 60");
  EXPECT_GT(gone.directories(0).mixed_bytes_per_s(), 0);
  EXPECT_EQ(gone.directories(1).mixed_bytes_per_s(), 0);
  EXPECT_TRUE(absl::StrContains(gone.directories(1).problem(), disk_ + "/b"));
}

TEST_F(OptctlTierTest, AMeasurementShowsHowFarItIs) {
  const Ran ran = Optctl("describe tier --measure");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output,
                                "measuring disks: 0 of 2 "
                                "directories, about 4 s left\n"))
      << ran.output;
  EXPECT_TRUE(absl::StrContains(ran.output, "both together")) << ran.output;
  const Ran full = OptctlToFull("describe tier --measure");
  EXPECT_EQ(full.exit_code, kExitOther) << full.output;
}

TEST_F(OptctlTierTest, AutoIsSaidBeforeThereIsAJob) {
  const auto small = Tiers("--bytes 1MiB").auto_placement();
  EXPECT_EQ(small.placement(), v1::PLACEMENT_HOST) << small.reason();
  const auto huge = Tiers("--bytes 1048576TiB").auto_placement();
  EXPECT_EQ(huge.placement(), v1::PLACEMENT_UNSPECIFIED) << huge.reason();
  EXPECT_TRUE(absl::StrContains(huge.reason(), "are left")) << huge.reason();
  const Ran wrong = Optctl("describe tier --bytes plenty");
  EXPECT_EQ(wrong.exit_code, kExitUsage) << wrong.output;
  EXPECT_TRUE(absl::StrContains(wrong.output, "such as 64MiB"));
}

TEST_F(OptctlTierTest, JobsShareTheNodesBudget) {
  const auto first = Train("first", OnDisk(20 << 20));
  const uint64_t frames = Tiers().memory().frames_bytes();
  client::SessionOptions options;
  options.endpoint = daemon_->shm_endpoint();
  options.job = "second";
  options.storage = OnDisk(20 << 20);
  options.layout.groups.resize(1);
  options.layout.parameters = {{"weight", {2 << 20}, 2 << 20}};
  const absl::Status refused = client::Session::Open(options).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  for (const std::string& text :
       {absl::StrCat(" are left, others have \"first\" ", frames),
        std::string("nvme.host_budget_bytes")}) {
    EXPECT_TRUE(absl::StrContains(refused.message(), text)) << refused;
  }
  options.storage = OnDisk(12 << 20);
  EXPECT_TRUE(client::Session::Open(options).ok());
  const Ran more = Optctl("set job second host_budget=64MiB");
  EXPECT_EQ(more.exit_code, kExitOther) << more.output;
  EXPECT_TRUE(absl::StrContains(more.output, "nvme.host_budget_bytes"))
      << more.output;
  EXPECT_EQ(Optctl("set job second host_budget=10MiB").exit_code, kExitOk);
}

TEST_F(OptctlTierTest, ADirectoryHasNoMoreThanItsLimit) {
  ASSERT_NO_FATAL_FAILURE(Start("directory_bytes_max: [0, 1 MiB]"));
  client::SessionOptions options;
  options.endpoint = daemon_->shm_endpoint();
  options.job = "gpt";
  options.storage = OnDisk();
  options.layout.groups.resize(1);
  options.layout.parameters = {{"weight", {1 << 20}, 1 << 20}};
  const absl::Status refused = client::Session::Open(options).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), disk_ + "/b")) << refused;
  EXPECT_EQ(Tiers().directories(1).limit_bytes(), 1u << 20);
}

}  // namespace
}  // namespace optstate::ctl
