// A disk that fails: an error with a code for what lies on it, never a wrong
// value, while jobs on another disk and in memory go on.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/session/testing/disk_job_fixture.h"
#include "server/session/testing/job_harness.h"

namespace {

enum class Call : uint8_t { kRead, kWrite, kSync };

// While `failing_disk` is set, this call on files below it has this error.
std::atomic<const std::string*> failing_disk = nullptr;
std::atomic<Call> failing_call = Call::kRead;
std::atomic<int> failing_error = EIO;

bool Fails(Call call, int fd) {
  const std::string* const disk = failing_disk;
  if (disk == nullptr || call != failing_call) return false;
  char path[4096] = {};
  const std::string link = absl::StrCat("/proc/self/fd/", fd);
  if (::readlink(link.c_str(), path, sizeof(path) - 1) <= 0 ||
      !absl::StartsWith(path, *disk + "/")) {
    return false;
  }
  errno = failing_error;
  return true;
}

}  // namespace

ssize_t RealRead(int fd, void* to, size_t bytes, off_t at) asm("__real_pread");
ssize_t WrappedRead(int fd, void* to, size_t bytes,
                    off_t at) asm("__wrap_pread");
ssize_t WrappedRead(int fd, void* to, size_t bytes, off_t at) {
  return Fails(Call::kRead, fd) ? -1 : RealRead(fd, to, bytes, at);
}

ssize_t RealWrite(int fd, const void* from, size_t bytes,
                  off_t at) asm("__real_pwrite");
ssize_t WrappedWrite(int fd, const void* from, size_t bytes,
                     off_t at) asm("__wrap_pwrite");
ssize_t WrappedWrite(int fd, const void* from, size_t bytes, off_t at) {
  return Fails(Call::kWrite, fd) ? -1 : RealWrite(fd, from, bytes, at);
}

int RealDataSync(int fd) asm("__real_fdatasync");
int WrappedDataSync(int fd) asm("__wrap_fdatasync");
int WrappedDataSync(int fd) {
  return Fails(Call::kSync, fd) ? -1 : RealDataSync(fd);
}

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint32_t kRecords = 8;
constexpr uint64_t kLast = 6;

// The records lie in turn on both disks, so those with odd numbers are on the
// second one.
JobHarness::Setup OnTwoDisks() {
  JobHarness::Setup setup =
      DiskJobSetup(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP);
  setup.disks = 2;
  setup.nvme.mutable_directory_weights()->Resize(2, 1);
  return setup;
}

absl::Status TryStep(JobHarness* job, uint64_t step) {
  const std::vector<Hyperparams> groups(
      1, DefaultHyperparams(job->layout().optimizer()));
  job->SetGradients(job->RandomTensors(kSeed + step));
  job->PushAll(step);
  return job->CommitAll(SpecOf(step, groups)).status;
}

// All jobs have taken two steps, with the same gradients. Each has directories
// of its own.
class JobFailingDiskTest : public testing::Test {
 protected:
  JobFailingDiskTest() {
    for (JobHarness* job :
         {&failing_, &on_another_disk_, &in_memory_, &undisturbed_}) {
      job->Start(job->RandomTensors(kSeed));
      Train(job, 1, 2);
    }
    disk_ = failing_.Disks()[1];
  }
  ~JobFailingDiskTest() override { failing_disk = nullptr; }

  void Fail(Call call, int error) {
    failing_call = call;
    failing_error = error;
    failing_disk = &disk_;
  }
  static void Mend() { failing_disk = nullptr; }

  JobHarness failing_{OnTwoDisks()};
  JobHarness on_another_disk_{
      DiskJobSetup(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP)};
  JobHarness in_memory_{
      DiskJobSetup(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_NONE)};
  JobHarness undisturbed_{
      DiskJobSetup(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_NONE)};
  std::string disk_;  // the one that fails
};

TEST_F(JobFailingDiskTest, ReadsOfItsSubGroupsAloneFail) {
  Fail(Call::kRead, EIO);
  uint32_t failed = 0;
  for (uint32_t record = 0; record < kRecords; ++record) {
    SCOPED_TRACE(record);
    const uint32_t parameter = record < 5 ? 0 : 1;
    const uint64_t begin = (record - 5 * parameter) * kSubGroup;
    std::vector<float> values(kSubGroup);
    const absl::Status status =
        failing_.job()
            .Fetch(v1::STATE_ARRAY_STATE_0, parameter, begin, kSubGroup,
                   absl::MakeSpan(reinterpret_cast<std::byte*>(values.data()),
                                  values.size() * sizeof(float)))
            .status();
    // The memory may have a record of that disk.
    if (record % 2 == 1 && !status.ok()) {
      ++failed;
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(disk_ + "/jobs/test/records"),
                        HasSubstr(" at "), HasSubstr("dmesg")));
      continue;
    }
    ASSERT_EQ(status, absl::OkStatus());
    const std::vector<float> all =
        undisturbed_.Fetch(v1::STATE_ARRAY_STATE_0, parameter);
    EXPECT_TRUE(std::equal(values.begin(), values.end(),
                           all.begin() + static_cast<ptrdiff_t>(begin)));
  }
  EXPECT_GT(failed, 0u);
  Mend();
  for (JobHarness* job : {&failing_, &undisturbed_}) Train(job, 3, kLast);
  EXPECT_EQ(failing_.StateBytes(), undisturbed_.StateBytes());
}

// The error of a call on one disk, and that of the step.
struct Fault {
  const char* name;
  Call call;
  int error;
  absl::StatusCode code;
  const char* text;  // of what to do
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

class JobFailingDiskStepTest : public JobFailingDiskTest,
                               public testing::WithParamInterface<Fault> {};

TEST_P(JobFailingDiskStepTest, OtherJobsGoOnAndItsOwnGoesOnOnceItIsMended) {
  const Fault& fault = GetParam();
  Train(&undisturbed_, 3, kLast);
  Fail(fault.call, fault.error);
  std::thread on_another_disk([&] { Train(&on_another_disk_, 3, kLast); });
  std::thread in_memory([&] { Train(&in_memory_, 3, kLast); });
  const absl::Status failed = TryStep(&failing_, 3);
  on_another_disk.join();
  in_memory.join();

  EXPECT_EQ(failed.code(), fault.code) << failed;
  EXPECT_THAT(
      std::string(failed.message()),
      AllOf(HasSubstr("optctl recover test"),
            HasSubstr(disk_ + "/jobs/test/records"), HasSubstr(fault.text),
            Not(HasSubstr(failing_.Disks()[0] + "/"))));
  const v1::Job described = failing_.job().Describe();
  EXPECT_EQ(described.phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(described.reason(), HasSubstr(fault.text));
  // The next call is told too.
  EXPECT_EQ(failing_.Push(0, 4, 0, 2).code(), fault.code);
  for (JobHarness* job : {&on_another_disk_, &in_memory_}) {
    EXPECT_EQ(job->job().Describe().phase(), v1::JOB_PHASE_READY);
    EXPECT_EQ(job->job().Describe().committed_step(), kLast);
    EXPECT_EQ(job->StateBytes(), undisturbed_.StateBytes());
  }

  Mend();
  failing_.Close();
  failing_.DropMemory();
  ASSERT_EQ(failing_.Open(), absl::OkStatus());
  failing_.AttachAll();
  ASSERT_EQ(failing_.job().Describe().committed_step(), 2u);
  Train(&failing_, 3, kLast);
  EXPECT_EQ(failing_.StateBytes(), undisturbed_.StateBytes());
}

// The error of a step is never UNAVAILABLE, after which a client would ask
// again.
INSTANTIATE_TEST_SUITE_P(
    Faults, JobFailingDiskStepTest,
    testing::Values(
        Fault{"Read", Call::kRead, EIO, absl::StatusCode::kDataLoss, "dmesg"},
        Fault{"Medium", Call::kRead, ENODATA, absl::StatusCode::kDataLoss,
              "smartctl"},
        Fault{"Write", Call::kWrite, EIO, absl::StatusCode::kDataLoss, "dmesg"},
        Fault{"Full", Call::kWrite, ENOSPC,
              absl::StatusCode::kResourceExhausted, "optctl delete job"},
        Fault{"Gone", Call::kWrite, ENODEV,
              absl::StatusCode::kFailedPrecondition, "lsblk"},
        Fault{"ReadOnly", Call::kWrite, EROFS,
              absl::StatusCode::kFailedPrecondition, "remount,rw"},
        Fault{"Sync", Call::kSync, EIO, absl::StatusCode::kDataLoss, "dmesg"}),
    [](const auto& tested) { return tested.param.name; });

// Records that stay on a device lag behind on disk. One that cannot be read at
// the engine's end is as old as it was, and no commit names it.
TEST(JobFailingDiskDeviceTest, AtTheEndNoCommitHasARecordThatLags) {
  JobHarness::Setup setup =
      DiskJobSetup(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_EVERY);
  setup.storage.set_every_steps(100);
  setup.storage.set_offload_fraction(0);
  setup.storage.set_device_budget_bytes(uint64_t{64} << 20);
  setup.devices = "emulated:1";
  JobHarness job(setup);
  setup.storage.Clear();
  setup.devices = "none";
  JobHarness in_memory(setup);
  for (JobHarness* each : {&job, &in_memory}) {
    each->Start(each->RandomTensors(kSeed));
    Train(each, 1, 3);
  }
  const std::string disk = job.disk();
  failing_call = Call::kRead;
  failing_error = EIO;
  failing_disk = &disk;
  job.job().Stop();
  job.Close();
  failing_disk = nullptr;
  ASSERT_EQ(job.Open(), absl::OkStatus());
  EXPECT_EQ(job.job().Describe().disk().durable_step(), 0u);
  job.AttachAll();
  EXPECT_EQ(job.StateBytes(), in_memory.StateBytes());
  job.job().Stop();
  job.Close();
  job.DropMemory();
  ASSERT_EQ(job.Open(), absl::OkStatus());
  job.AttachAll();
  EXPECT_EQ(job.job().Describe().committed_step(), 3u);
  EXPECT_EQ(job.StateBytes(), in_memory.StateBytes());
}

}  // namespace
}  // namespace optstate::session
