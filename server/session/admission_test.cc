#include "server/session/admission.h"

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "server/access/colleagues.h"
#include "storage/testing/test_mounts.h"
#include "storage/tmpfs_info.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;

// A fixture with a folder on tmpfs that has a file of 64 KiB.
class AdmissionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = "/dev/shm/admission-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) GTEST_SKIP() << "no /dev/shm";
    directory_ = name;
    std::ofstream(directory_ + "/file") << std::string(64 << 10, 'x');
  }
  ~AdmissionTest() override {
    if (!directory_.empty()) fs::remove_all(directory_);
  }

  // Makes a job whose files take a little more than so many bytes.
  void MakeJob(const std::string& name, uid_t owner, size_t bytes) const {
    const std::string job = directory_ + "/jobs/" + name;
    fs::create_directories(job);
    std::ofstream(job + "/owner") << owner << "\n";
    std::ofstream(job + "/state") << std::string(bytes, 'x');
  }

  // Expects that this many bytes are left, and that one byte more is refused.
  void ExpectLeft(uint64_t bytes) const {
    const auto left = StateBytesLeft(directory_, limits_);
    ASSERT_TRUE(left.ok()) << left.status();
    EXPECT_EQ(*left, bytes);
    AdmissionRequest request;
    request.directory = directory_;
    request.limits = limits_;
    request.new_state_bytes = bytes;
    EXPECT_TRUE(Admit(request).ok()) << Admit(request);
    request.new_state_bytes = bytes + 1;
    EXPECT_TRUE(absl::IsResourceExhausted(Admit(request)));
  }

  std::string directory_;
  v1::Limits limits_;
};

TEST_F(AdmissionTest, LeftIsWhatTheLimitLeaves) {
  limits_.set_state_bytes_max(100 << 10);
  ExpectLeft(36 << 10);
  limits_.set_state_bytes_max(10 << 10);
  ExpectLeft(0);
}

TEST_F(AdmissionTest, UsersLeaveThePartOfOperators) {
  limits_.set_state_bytes_max(200 << 10);
  limits_.set_operator_reserve_percent(25);
  AdmissionRequest request;
  request.directory = directory_;
  request.limits = limits_;
  request.uid = 4711;
  const uint64_t left = 200 * 1024 - 64 * 1024 - 200 * 1024 / 4;
  request.new_state_bytes = left - 100;
  EXPECT_TRUE(Admit(request).ok()) << Admit(request);
  request.new_state_bytes = left + 100;
  const absl::Status refused = Admit(request);
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_NE(refused.message().find("limits.operator_reserve_percent"),
            absl::string_view::npos)
      << refused;
  for (const uid_t uid : {uid_t{0}, ::geteuid()}) {
    request.uid = uid;
    EXPECT_TRUE(Admit(request).ok()) << Admit(request);
  }
}

TEST_F(AdmissionTest, AUsersJobsTogetherHaveALimit) {
  limits_.set_user_state_bytes_max(100 << 10);
  AdmissionRequest request;
  request.directory = directory_;
  request.limits = limits_;
  request.uid = 4711;
  request.new_state_bytes = 80 << 10;
  EXPECT_TRUE(Admit(request).ok()) << Admit(request);
  for (const char* owner : {"4712", "4711"}) {
    const std::string job = directory_ + "/jobs/of-" + owner;
    fs::create_directories(job);
    std::ofstream(job + "/owner") << owner << "\n";
    std::ofstream(job + "/state") << std::string(40 << 10, 'x');
    EXPECT_EQ(Admit(request).ok(), std::string(owner) == "4712");
  }
  EXPECT_NE(Admit(request).message().find("limits.user_state_bytes_max"),
            absl::string_view::npos);
  request.uid = 0;
  EXPECT_TRUE(Admit(request).ok()) << Admit(request);
}

TEST_F(AdmissionTest, AUsersQuotaTakesThePlaceOfTheLimit) {
  limits_.set_user_state_bytes_max(1);
  AdmissionRequest request;
  request.directory = directory_;
  request.limits = limits_;
  request.uid = 4711;
  v1::Quota& quota = *request.quotas.Add();
  quota.set_user("4711");
  quota.set_state_bytes_max(100 << 10);
  MakeJob("a", 4711, 40 << 10);
  MakeJob("b", 4712, 400 << 10);
  request.new_state_bytes = 40 << 10;
  EXPECT_TRUE(Admit(request).ok()) << Admit(request);
  request.new_state_bytes = 80 << 10;
  const absl::Status refused = Admit(request);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_NE(refused.message().find(
                "quota of user 4711: state_bytes_max is 102400 bytes: the job "
                "needs 81920 bytes"),
            absl::string_view::npos)
      << refused;
  request.uid = 4712;  // who has no quota of its own
  EXPECT_NE(Admit(request).message().find("limits.user_state_bytes_max"),
            absl::string_view::npos);
}

TEST_F(AdmissionTest, TheMembersOfAGroupHaveAQuotaTogether) {
  const auto found = access::FindColleagues();
  if (!found.has_value()) {
    GTEST_SKIP() << "this machine has no two users in one group";
  }
  AdmissionRequest request;
  request.directory = directory_;
  v1::Quota& quota = *request.quotas.Add();
  quota.set_group(std::to_string(found->group));
  quota.set_state_bytes_max(100 << 10);
  MakeJob("a", found->first, 40 << 10);
  request.new_state_bytes = 80 << 10;
  for (const uid_t uid : {found->first, found->second}) {
    request.uid = uid;
    const absl::Status refused = Admit(request);
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_NE(refused.message().find("quota of group"), absl::string_view::npos)
        << refused;
  }
  for (const uid_t uid : {uid_t{0}, ::geteuid()}) {
    request.uid = uid;
    EXPECT_TRUE(Admit(request).ok()) << Admit(request);
  }
}

TEST_F(AdmissionTest, LeftIsWhatTheMemoryLeaves) {
  limits_.set_memory_reserve_bytes(UINT64_MAX);
  ExpectLeft(0);
}

TEST_F(AdmissionTest, TablesTakeMemoryAndNoneOfTheJobsLimits) {
  AdmissionRequest request;
  request.directory = directory_;
  limits_.set_job_state_bytes_max(1);
  limits_.set_state_bytes_max(65 << 10);
  request.limits = limits_;
  request.table_bytes = 1 << 20;
  EXPECT_TRUE(Admit(request).ok()) << Admit(request);
  request.limits.set_memory_reserve_bytes(UINT64_MAX);
  const absl::Status refused = Admit(request);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_NE(refused.message().find("needs 1048576 bytes"), std::string::npos)
      << refused;
  request.table_bytes = 0;
  EXPECT_TRUE(Admit(request).ok()) << Admit(request);
}

TEST_F(AdmissionTest, ANewJobNeedsInodes) {
  const auto tmpfs = storage::TestTmpfs::Mount(directory_, "nr_inodes=8");
  if (absl::IsFailedPrecondition(tmpfs.status())) {
    GTEST_SKIP() << tmpfs.status();
  }
  ASSERT_TRUE(tmpfs.ok()) << tmpfs.status();
  AdmissionRequest request;
  request.directory = directory_;
  request.job_state_bytes = 8192;
  request.new_state_bytes = 8192;
  const absl::Status refused = Admit(request);
  // An extension makes no further files.
  request.new_state_bytes = 4096;
  const absl::Status extension = Admit(request);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_NE(refused.message().find("nr_inodes="), std::string::npos) << refused;
  EXPECT_TRUE(extension.ok()) << extension;
}

TEST_F(AdmissionTest, LeftIsNotMoreThanTheFileSystemHas) {
  const auto left = StateBytesLeft(directory_, limits_);
  const auto info = storage::InspectDirectory(directory_);
  ASSERT_TRUE(left.ok() && info.ok());
  EXPECT_LE(*left, info->bytes_total);
  EXPECT_TRUE(
      absl::IsNotFound(StateBytesLeft(directory_ + "/no", limits_).status()));
}

}  // namespace
}  // namespace optstate::session
