#include "server/session/tiers/quota_rooms.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/access/colleagues.h"
#include "server/session/tiers/node_budget.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr uid_t kAda = 4711;
constexpr uid_t kBob = 4712;

class QuotaRoomsTest : public testing::Test {
 protected:
  QuotaRoomsTest() : root_(testing::TempDir() + "/quota-rooms-XXXXXX") {
    if (::mkdtemp(root_.data()) == nullptr) std::abort();
    config_.set_state_dir(root_);
    for (const char* directory : {"/d0", "/d1"}) {
      config_.mutable_nvme()->add_directories(root_ + directory);
    }
  }
  ~QuotaRoomsTest() override { fs::remove_all(root_); }

  void Give(const std::string& file, size_t bytes) const {
    Write(file, std::string(bytes, 'x'));
  }
  void Write(const std::string& file, const std::string& text) const {
    fs::create_directories(fs::path(root_ + file).parent_path());
    std::ofstream(root_ + file) << text;
  }
  void MakeJob(const std::string& name, uid_t owner, size_t frames) const {
    Write(absl::StrCat("/jobs/", name, "/owner"), absl::StrCat(owner, "\n"));
    if (frames == 0) return;
    Give(absl::StrCat("/jobs/", name, "/state/frames"), frames);
  }
  OwnedJob Job(const std::string& name, uid_t owner) const {
    return {&config_, root_, owner, name};
  }
  v1::Quota& AddQuota(uid_t user) {
    v1::Quota& quota = *config_.add_quotas();
    quota.set_user(absl::StrCat(user));
    return quota;
  }
  static void ExpectRefused(const absl::Status& status,
                            const std::string& why) {
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }

  std::string root_;
  v1::DaemonConfig config_;
};

TEST_F(QuotaRoomsTest, FramesOfAUsersJobsCountTogether) {
  MakeJob("a", kAda, 3000);
  MakeJob("b", kAda, 5000);
  MakeJob("c", kBob, 90000);
  EXPECT_TRUE(CheckFramesQuotas(Job("new", kAda), uint64_t{1} << 40).ok());
  AddQuota(kAda).set_frames_bytes_max(10000);
  EXPECT_TRUE(CheckFramesQuotas(Job("new", kAda), 2000).ok());
  const absl::Status refused = CheckFramesQuotas(Job("new", kAda), 2001);
  ExpectRefused(refused,
                "quota of user 4711: frames_bytes_max is 10000 bytes: the job "
                "needs 2001, 2000 are left");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("host_budget="));
  // A job's own frames are the part of it that it has already.
  EXPECT_TRUE(CheckFramesQuotas(Job("b", kAda), 7000).ok());
  ExpectRefused(CheckFramesQuotas(Job("b", kAda), 7001), "7000 are left");
  // It does not concern others.
  EXPECT_TRUE(CheckFramesQuotas(Job("new", kBob), 90000).ok());
}

TEST_F(QuotaRoomsTest, DiskBytesOfAllDirectoriesCountTogether) {
  MakeJob("a", kAda, 0);
  Give("/d0/jobs/a/records", 64 << 10);
  Give("/d1/jobs/a/records", 64 << 10);
  MakeJob("b", kBob, 0);
  Give("/d1/jobs/b/records", 1 << 20);
  const uint64_t taken = DiskBytesOfJobs(root_ + "/d0")[0].bytes * 2;
  AddQuota(kAda).set_disk_bytes_max(taken + 1000);
  EXPECT_TRUE(CheckDiskQuotas(Job("new", kAda), {600, 400}).ok());
  ExpectRefused(
      CheckDiskQuotas(Job("new", kAda), {600, 401}),
      absl::StrCat("quota of user 4711: disk_bytes_max is ", taken + 1000,
                   " bytes: the job needs 1001, 1000 are left"));
  // Instead of what the job has, and beside that.
  EXPECT_TRUE(CheckDiskQuotas(Job("a", kAda), {taken, 1000}).ok());
  EXPECT_TRUE(CheckDiskQuotas(Job("a", kAda), {1000}, /*beside=*/true).ok());
  ExpectRefused(CheckDiskQuotas(Job("a", kAda), {1001}, /*beside=*/true),
                "1000 are left");
}

// As after a reboot, when its directory could not be made.
TEST_F(QuotaRoomsTest, AJobThatIsOnDiskAloneHasItsOwnerThere) {
  Write("/d0/jobs/a/owner", absl::StrCat(kAda, "\n"));
  Give("/d1/jobs/a/records", 64 << 10);
  const auto taken = DiskBytesByOwner(root_, config_.nvme());
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_GE(taken.at(kAda), 64u << 10);
}

TEST_F(QuotaRoomsTest, TheMembersOfAGroupHaveAQuotaTogether) {
  const auto found = access::FindColleagues();
  if (!found.has_value()) {
    GTEST_SKIP() << "this machine has no two users in one group";
  }
  const auto [group, ada, bob] = *found;
  MakeJob("a", ada, 3000);
  MakeJob("b", bob, 5000);
  MakeJob("c", 0, 90000);  // root's
  v1::Quota& quota = *config_.add_quotas();
  quota.set_group(absl::StrCat(group));
  quota.set_frames_bytes_max(10000);
  for (const uid_t uid : {ada, bob}) {
    EXPECT_TRUE(CheckFramesQuotas(Job("new", uid), 2000).ok());
    ExpectRefused(CheckFramesQuotas(Job("new", uid), 2001),
                  absl::StrCat("quota of group ", group, ": frames_bytes_max"));
  }
  // Neither root nor the daemon's user has a quota.
  for (const uid_t uid : {uid_t{0}, ::geteuid()}) {
    EXPECT_TRUE(CheckFramesQuotas(Job("new", uid), 1 << 20).ok());
  }
}

TEST_F(QuotaRoomsTest, TheTighterOfTwoCounts) {
  const auto found = access::FindColleagues();
  if (!found.has_value()) {
    GTEST_SKIP() << "this machine has no two users in one group";
  }
  AddQuota(found->first).set_frames_bytes_max(1000);
  v1::Quota& quota = *config_.add_quotas();
  quota.set_group(absl::StrCat(found->group));
  quota.set_frames_bytes_max(2000);
  MakeJob("b", found->second, 1500);
  ExpectRefused(CheckFramesQuotas(Job("new", found->first), 1001),
                "quota of user");
  ExpectRefused(CheckFramesQuotas(Job("new", found->first), 501),
                "quota of group");
  EXPECT_TRUE(CheckFramesQuotas(Job("new", found->first), 500).ok());
}

TEST_F(QuotaRoomsTest, WhatOwnersHaveIsAddedUp) {
  MakeJob("a", kAda, 3000);
  MakeJob("b", kAda, 5000);
  MakeJob("c", kBob, 10);
  EXPECT_THAT(FramesByOwner(root_),
              UnorderedElementsAre(Pair(kAda, 8000u), Pair(kBob, 10u)));
  EXPECT_THAT(FramesByOwner(root_, "b"),
              UnorderedElementsAre(Pair(kAda, 3000u), Pair(kBob, 10u)));
}

}  // namespace
}  // namespace optstate::session
