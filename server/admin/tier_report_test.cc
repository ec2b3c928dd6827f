#include "server/admin/tier_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace optstate::admin {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class TierReportTest : public testing::Test {
 protected:
  TierReportTest() : root_(testing::TempDir() + "/tier-report-XXXXXX") {
    if (::mkdtemp(root_.data()) == nullptr) std::abort();
    for (const char* folder : {"/state", "/a", "/b"}) {
      fs::create_directory(root_ + folder);
    }
    config_.set_state_dir(root_ + "/state");
    config_.mutable_engine()->set_subgroup_elements(4096);
    config_.mutable_nvme()->set_job_host_budget_bytes(1 << 20);
    config_.mutable_nvme()->add_directories(root_ + "/a");
    config_.mutable_nvme()->add_directories(root_ + "/b");
  }
  ~TierReportTest() override { fs::remove_all(root_); }

  v1::DescribeTiersReply Describe(uint64_t job_bytes = 0) const {
    v1::DescribeTiersRequest request;
    request.set_job_bytes(job_bytes);
    return DescribeTiers(config_, jobs_, request);
  }
  void Give(const std::string& file, size_t bytes) const {
    fs::create_directories(fs::path(root_ + file).parent_path());
    std::ofstream(root_ + file) << std::string(bytes, 'x');
  }

  std::string root_;
  v1::DaemonConfig config_;
  std::vector<supervisor::JobSummary> jobs_;
};

TEST_F(TierReportTest, JobsAreCountedWhereTheyHaveFiles) {
  Give("/state/jobs/gpt/state/frames", 8192);
  Give("/state/jobs/gpt/state/control", 4096);
  Give("/b/jobs/gpt/records", 65536);
  supervisor::JobSummary& job = jobs_.emplace_back();
  job.name = "gpt";
  job.directory = root_ + "/state/jobs/gpt";
  config_.mutable_nvme()->add_directory_bytes_max(0);
  config_.mutable_nvme()->add_directory_bytes_max(1 << 20);
  const v1::DescribeTiersReply tiers = Describe();
  EXPECT_EQ(tiers.memory().frames_bytes(), 8192u);
  EXPECT_EQ(tiers.memory().used_bytes(), tiers.memory().jobs(0).bytes());
  EXPECT_GE(tiers.memory().used_bytes(), 8192u + 4096u);
  EXPECT_EQ(tiers.directories(0).used_bytes(), 0u);
  const v1::DirectoryTier& tier = tiers.directories(1);
  EXPECT_EQ(tier.jobs(0).job(), "gpt");
  EXPECT_EQ(tier.free_bytes(), (1u << 20) - tier.used_bytes());
  EXPECT_EQ(tier.limit_bytes(), 1u << 20);
  EXPECT_FALSE(tiers.has_auto_placement());
}

TEST_F(TierReportTest, ADirectoryThatHasGoneIsSaid) {
  fs::remove(root_ + "/b");
  const v1::DescribeTiersReply tiers = Describe();
  EXPECT_EQ(tiers.directories(0).problem(), "");
  EXPECT_THAT(tiers.directories(1).problem(), HasSubstr(root_ + "/b"));
}

TEST_F(TierReportTest, AutoFillsMemoryThenTheDiskThenRefuses) {
  EXPECT_EQ(Describe(1 << 20).auto_placement().placement(), v1::PLACEMENT_HOST);
  config_.mutable_limits()->set_state_bytes_max(2 << 20);
  const v1::AutoPlacement swapped = Describe(8 << 20).auto_placement();
  EXPECT_EQ(swapped.placement(), v1::PLACEMENT_NVME) << swapped.reason();
  // The default of a job, in whole records of 48 KiB.
  EXPECT_EQ(swapped.host_budget_bytes(), (1u << 20) / 49152 * 49152);
  config_.mutable_nvme()->set_host_budget_bytes(4 * 49152 + 1);
  EXPECT_EQ(Describe(8 << 20).auto_placement().host_budget_bytes(), 4 * 49152u);
  config_.mutable_nvme()->set_host_budget_bytes(2 * 49152);
  const v1::AutoPlacement refused = Describe(8 << 20).auto_placement();
  EXPECT_EQ(refused.placement(), v1::PLACEMENT_UNSPECIFIED);
  EXPECT_THAT(refused.reason(), HasSubstr("the job needs 147456, 98304 are"));
  config_.mutable_nvme()->clear_host_budget_bytes();
  config_.mutable_nvme()->add_directory_bytes_max(0);
  config_.mutable_nvme()->add_directory_bytes_max(1 << 20);
  const v1::AutoPlacement full = Describe(8 << 20).auto_placement();
  EXPECT_EQ(full.placement(), v1::PLACEMENT_UNSPECIFIED);
  EXPECT_THAT(full.reason(), HasSubstr(root_ + "/b"));
}

}  // namespace
}  // namespace optstate::admin
