#include "server/supervisor/sleep/wake_admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "optstate/v1/session.pb.h"
#include "server/session/engine_memory.h"
#include "server/supervisor/sleep/sleep_manifest.h"
#include "storage/format/checked_file.h"
#include "storage/state_folder.h"
#include "storage/testing/lock_limit.h"

namespace optstate::supervisor {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uid_t kUid = 4711;
constexpr uint64_t kKiB = 1024;

class WakeAdmissionTest : public testing::Test {
 protected:
  WakeAdmissionTest() {
    EXPECT_NE(::mkdtemp(directory_.data()), nullptr);
    config_.set_state_dir(directory_ + "/state");
    place_.job = "a";
    place_.uid = kUid;
    place_.job_directory = MakeJob("a", kUid, 0);
    place_.folder = directory_ + "/disk/a";
    fs::create_directories(place_.folder + kFilesFolder +
                           storage::kStateFolder);
    manifest_.set_job("a");
  }
  ~WakeAdmissionTest() override { fs::remove_all(directory_); }

  // Makes the directory of a job whose files take so many bytes.
  std::string MakeJob(const std::string& name, uid_t uid, uint64_t bytes) {
    const std::string folder =
        absl::StrCat(config_.state_dir(), "/jobs/", name);
    fs::create_directories(folder);
    std::ofstream(folder + "/owner") << uid << "\n";
    std::ofstream(folder + "/file") << std::string(bytes, 'x');
    return folder;
  }
  // Adds a file to those of the sleeping job.
  void AddFile(const std::string& path, uint64_t bytes) {
    v1::SleepFile& file = *manifest_.add_files();
    file.set_path(path);
    file.set_size(bytes);
    file.set_allocated_bytes(bytes);
  }

  absl::Status Admit() {
    is_reserved_ = false;
    return AdmitToWake(config_, place_, manifest_, [this] {
      is_reserved_ = true;
      return reserved_;
    });
  }
  void ExpectRefused(const std::string& what) {
    const absl::Status refused = Admit();
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("job \"a\" stays asleep"), HasSubstr(what)));
    EXPECT_FALSE(is_reserved_);
  }
  void ExpectAdmitted() {
    const absl::Status admitted = Admit();
    EXPECT_TRUE(admitted.ok()) << admitted;
    EXPECT_TRUE(is_reserved_);
  }
  v1::Limits& limits() { return *config_.mutable_limits(); }

  std::string directory_ = ::testing::TempDir() + "/wake_admission-XXXXXX";
  v1::DaemonConfig config_;
  SleepPlace place_;
  v1::SleepManifest manifest_;
  absl::Status reserved_;
  bool is_reserved_ = false;
};

TEST_F(WakeAdmissionTest, TheLimitOfOneJob) {
  AddFile("state/control", 64 * kKiB);
  AddFile("boot", 1);
  limits().set_job_state_bytes_max(64 * kKiB);
  ExpectRefused("limits.job_state_bytes_max");
  limits().set_job_state_bytes_max(64 * kKiB + 1);
  ExpectAdmitted();
}

TEST_F(WakeAdmissionTest, TheLimitOfAllJobs) {
  AddFile("state/control", 64 * kKiB);
  limits().set_state_bytes_max(256 * kKiB);
  ExpectAdmitted();
  MakeJob("b", kUid + 1, 224 * kKiB);
  ExpectRefused("limits.state_bytes_max");
}

TEST_F(WakeAdmissionTest, TheLimitOfTheOwner) {
  AddFile("state/control", 64 * kKiB);
  limits().set_user_state_bytes_max(256 * kKiB);
  MakeJob("b", kUid + 1, 224 * kKiB);
  ExpectAdmitted();
  MakeJob("c", kUid, 224 * kKiB);
  ExpectRefused(absl::StrCat("limit of the jobs of uid ", kUid));
  // Operators have no such limit.
  place_.uid = ::geteuid();
  ExpectAdmitted();
}

TEST_F(WakeAdmissionTest, TheQuotasOfTheOwner) {
  AddFile("state/control", 64 * kKiB);
  v1::Quota& quota = *config_.add_quotas();
  quota.set_user(absl::StrCat(kUid));
  quota.set_state_bytes_max(256 * kKiB);
  limits().set_user_state_bytes_max(1);  // the quota takes its place
  MakeJob("b", kUid + 1, 224 * kKiB);
  ExpectAdmitted();
  MakeJob("c", kUid, 224 * kKiB);
  ExpectRefused(absl::StrCat("quota of user ", kUid, ": state_bytes_max"));
  quota.set_state_bytes_max(1024 * kKiB);
  AddFile("state/frames", 64 * kKiB);
  quota.set_frames_bytes_max(64 * kKiB);
  ExpectAdmitted();
  quota.set_frames_bytes_max(64 * kKiB - 1);
  ExpectRefused(absl::StrCat("quota of user ", kUid, ": frames_bytes_max"));
}

TEST_F(WakeAdmissionTest, WhatIsKeptForOperators) {
  AddFile("state/control", 192 * kKiB);
  limits().set_state_bytes_max(256 * kKiB);
  limits().set_operator_reserve_percent(50);
  ExpectRefused("limits.operator_reserve_percent");
  place_.uid = ::geteuid();
  ExpectAdmitted();
}

TEST_F(WakeAdmissionTest, TheNodesBudgetForFrames) {
  AddFile("state/frames", 64 * kKiB);
  config_.mutable_nvme()->set_host_budget_bytes(128 * kKiB);
  ExpectAdmitted();
  const std::string other = MakeJob("b", kUid, 0) + storage::kStateFolder;
  fs::create_directory(other);
  std::ofstream(other + "/frames") << std::string(96 * kKiB, 'x');
  ExpectRefused("nvme.host_budget_bytes");
}

TEST_F(WakeAdmissionTest, TheMemoryOfTheEngineItself) {
  // No byte is left, and none is needed.
  limits().set_memory_reserve_bytes(UINT64_MAX);
  ExpectAdmitted();
  v1::RegisterRequest request;
  v1::Layout& layout = *request.mutable_layout();
  layout.set_optimizer(v1::OPTIMIZER_KIND_ADAMW);
  layout.add_groups();
  v1::Parameter& parameter = *layout.add_parameters();
  parameter.set_name("p");
  parameter.add_shape(3);
  parameter.set_numel(3);
  parameter.set_dtype(v1::DTYPE_FLOAT32);
  parameter.set_gradient_dtype(v1::DTYPE_FLOAT32);
  request.set_world_size(1);
  request.set_local_world_size(1);
  request.set_partition(v1::PARTITION_MODE_GREEDY);
  const std::string files = place_.folder + kFilesFolder;
  const absl::Status written =
      storage::WriteCheckedFile(absl::StrCat(files, storage::kStateFolder, "/",
                                             storage::kDescriptionFile),
                                {.layout_hash = std::string(32, 'h'),
                                 .incarnation = 1,
                                 .payload = request.SerializeAsString()});
  ASSERT_TRUE(written.ok()) << written;
  const uint64_t bytes = session::EngineBytesOf(config_, files);
  EXPECT_GT(bytes, 0u);
  ExpectRefused("limits.memory_reserve_bytes");
  ExpectRefused(absl::StrCat("needs ", bytes, " bytes"));
}

// The copy of a damaged description is not taken, which is said by those who
// compare it.
TEST_F(WakeAdmissionTest, ADescriptionThatCannotBeReadTakesNoMemory) {
  const std::string path =
      absl::StrCat(place_.folder, kFilesFolder, storage::kStateFolder, "/",
                   storage::kDescriptionFile);
  std::ofstream(path) << "no description";
  limits().set_memory_reserve_bytes(UINT64_MAX);
  ExpectAdmitted();
}

TEST_F(WakeAdmissionTest, TheLimitOfLockedMemory) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "needs /dev/shm";
  constexpr uint64_t kLimit = 1 << 20;
  EXPECT_TRUE(storage::PassesWithLockLimit(kLimit, [this] {
    // Nothing but its kind of file system counts.
    place_.job_directory = "/dev/shm";
    config_.set_lock_memory(v1::LOCK_MEMORY_ALWAYS);
    AddFile("state/control", kLimit);
    // Files that no engine locks.
    AddFile("boot", 4 * kKiB);
    AddFile("state/job.binpb", 4 * kKiB);
    ExpectAdmitted();
    AddFile("state/undo", 4 * kKiB);
    ExpectRefused("lock_memory: always");
    config_.set_lock_memory(v1::LOCK_MEMORY_AUTO);
    ExpectAdmitted();
  }));
}

TEST_F(WakeAdmissionTest, AStateThatHasToBeLockedNeedsMemory) {
  place_.job_directory = "/proc";  // as good as a disk
  config_.set_lock_memory(v1::LOCK_MEMORY_ALWAYS);
  const absl::Status refused = Admit();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("Set state_dir to a tmpfs"));
  EXPECT_FALSE(is_reserved_);
}

TEST_F(WakeAdmissionTest, AnErrorOfTheReservationIsTheJobs) {
  reserved_ = absl::ResourceExhaustedError("no space");
  const absl::Status refused = Admit();
  EXPECT_TRUE(is_reserved_);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(HasSubstr("job \"a\" stays asleep"), HasSubstr("no space")));
}

}  // namespace
}  // namespace optstate::supervisor
