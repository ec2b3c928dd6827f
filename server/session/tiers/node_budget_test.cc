#include "server/session/tiers/node_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class NodeBudgetTest : public testing::Test {
 protected:
  NodeBudgetTest() : root_(testing::TempDir() + "/node-budget-XXXXXX") {
    if (::mkdtemp(root_.data()) == nullptr) std::abort();
  }
  ~NodeBudgetTest() override { fs::remove_all(root_); }

  void Give(const std::string& file, size_t bytes) const {
    fs::create_directories(fs::path(root_ + file).parent_path());
    std::ofstream(root_ + file) << std::string(bytes, 'x');
  }
  void Write(const std::string& file, const std::string& text) const {
    std::ofstream(root_ + file) << text;
  }
  absl::Status Check(const std::string& job, uint64_t bytes) const {
    return CheckNodeBudget(root_, settings_, job, bytes);
  }

  std::string root_;
  v1::NvmeSettings settings_;
};

TEST_F(NodeBudgetTest, FramesOfAllJobsCountTogether) {
  Give("/jobs/a/state/frames", 3000);
  Give("/jobs/b/state/frames", 5000);
  Give("/jobs/b/state/control", 9000);
  Give("/jobs/none/state/control", 9000);
  EXPECT_TRUE(Check("c", 1 << 30).ok());
  EXPECT_EQ(NodeBudgetLeft(root_, settings_, "c"), std::nullopt);
  settings_.set_host_budget_bytes(10000);
  EXPECT_EQ(NodeBudgetLeft(root_, settings_, "c"), 2000u);
  EXPECT_TRUE(Check("c", 2000).ok());
  const absl::Status refused = Check("c", 2001);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.message(),
              AllOf(HasSubstr("nvme.host_budget_bytes) is 10000 bytes: the job "
                              "needs 2001, 2000 are left, others have \"b\" "
                              "5000, \"a\" 3000"),
                    Not(HasSubstr("none"))));
  // A job's own frames are the part of it that it has already.
  EXPECT_EQ(NodeBudgetLeft(root_, settings_, "b"), 7000u);
  EXPECT_TRUE(Check("b", 7000).ok());
  EXPECT_FALSE(Check("b", 7001).ok());
  // A budget that was lowered below what there is.
  settings_.set_host_budget_bytes(10);
  EXPECT_EQ(NodeBudgetLeft(root_, settings_, "c"), 0u);
}

TEST_F(NodeBudgetTest, AnErrorNamesTheLargestOfMany) {
  for (int i = 0; i < 12; ++i) {
    Give(absl::StrCat("/jobs/", i, "/state/frames"), 100 + i);
  }
  settings_.set_host_budget_bytes(2000);
  EXPECT_THAT(Check("c", 2000).message(),
              AllOf(HasSubstr("\"11\" 111, \"10\" 110"), HasSubstr("4 more"),
                    Not(HasSubstr("\"3\" "))));
}

// A private job takes its part, and is not named.
TEST_F(NodeBudgetTest, AnErrorNamesNoPrivateJob) {
  Give("/jobs/open/state/frames", 300);
  Write("/jobs/open/access", "access 1 open\ngroup g\n");
  Give("/jobs/secret/state/frames", 500);
  Write("/jobs/secret/access", "access 1 private\n");
  Give("/jobs/damaged/state/frames", 400);
  Write("/jobs/damaged/access", "");
  settings_.set_host_budget_bytes(1000);
  EXPECT_THAT(Check("c", 1).message(),
              AllOf(HasSubstr("others have a private job 500, a private job "
                              "400, \"open\" 300"),
                    Not(HasSubstr("secret")), Not(HasSubstr("damaged"))));
}

TEST_F(NodeBudgetTest, ADirectoryNamesNoPrivateJob) {
  Give("/d0/jobs/secret/records", 4096);
  Write("/d0/jobs/secret/access", "access 1 private\n");
  Give("/d1/jobs/secret/records", 4096);
  settings_.add_directories(root_ + "/d0");
  settings_.add_directories(root_ + "/d1");
  settings_.add_directory_bytes_max(0);
  settings_.add_directory_bytes_max(1);
  const absl::Status refused = CheckDirectoryLimits(settings_, "b", {1, 1});
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.message(), AllOf(HasSubstr("others have a private job "),
                                       Not(HasSubstr("secret"))));
}

TEST_F(NodeBudgetTest, ADirectoryHasItsLimit) {
  Give("/d0/jobs/a/records", 4096);
  Give("/d1/jobs/a/records", 4096);
  settings_.add_directories(root_ + "/d0");
  settings_.add_directories(root_ + "/d1");
  EXPECT_TRUE(CheckDirectoryLimits(settings_, "b", {1 << 30, 1 << 30}).ok());
  settings_.add_directory_bytes_max(0);
  settings_.add_directory_bytes_max(65536);
  const uint64_t taken = DiskBytesOfJobs(root_ + "/d1")[0].bytes;
  EXPECT_TRUE(
      CheckDirectoryLimits(settings_, "b", {1 << 30, 65536 - taken}).ok());
  const absl::Status refused =
      CheckDirectoryLimits(settings_, "b", {1 << 30, 65536 - taken + 1});
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(
      refused.message(),
      HasSubstr(absl::StrCat("the limit of ", root_,
                             "/d1 (nvme.directory_bytes_max) is 65536 bytes")));
  EXPECT_TRUE(CheckDirectoryLimits(settings_, "a", {1 << 30, 65536}).ok());
}

}  // namespace
}  // namespace optstate::session
