// Damaged records and failing disks: a load replaces what cannot be read, and
// gives nothing up that another engine can still finish.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "server/session/testing/job_harness.h"

// While set, writes to the disk, or its flushes, fail.
static std::atomic<bool> writes_fail = false;
static std::atomic<bool> flushes_fail = false;

ssize_t RealWrite(int fd, const void* from, size_t bytes,
                  off_t at) asm("__real_pwrite");
ssize_t WrappedWrite(int fd, const void* from, size_t bytes,
                     off_t at) asm("__wrap_pwrite");
ssize_t WrappedWrite(int fd, const void* from, size_t bytes, off_t at) {
  if (!writes_fail) return RealWrite(fd, from, bytes, at);
  errno = EIO;
  return -1;
}

int RealDataSync(int fd) asm("__real_fdatasync");
int WrappedDataSync(int fd) asm("__wrap_fdatasync");
int WrappedDataSync(int fd) {
  if (!flushes_fail) return RealDataSync(fd);
  errno = EIO;
  return -1;
}

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kSeed = 7;
constexpr uint64_t kSubGroup = 8192;  // elements: two tiles
constexpr uint64_t kRecords = 8;

JobHarness::Setup SetupOf(v1::Placement placement) {
  JobHarness::Setup setup;
  setup.layout.groups.resize(1);
  setup.layout.parameters = {MakeParameter("a", 5 * kSubGroup),
                             MakeParameter("b", 3 * kSubGroup)};
  setup.subgroup_elements = kSubGroup;
  setup.storage.set_placement(placement);
  if (placement == v1::PLACEMENT_NVME) {
    setup.storage.set_durability(v1::DURABILITY_KIND_STEP);
  }
  setup.io_engine = v1::IO_ENGINE_KIND_BLOCKING;
  return setup;
}

CommitSpec SpecOf(uint64_t step, absl::Span<const Hyperparams> groups) {
  CommitSpec spec;
  spec.step = step;
  spec.groups = groups;
  return spec;
}

// Runs a step, which may fail.
absl::Status TryStep(JobHarness* job, uint64_t step) {
  const std::vector<Hyperparams> groups(
      1, DefaultHyperparams(job->layout().optimizer()));
  job->SetGradients(job->RandomTensors(kSeed + step));
  job->PushAll(step);
  return job->CommitAll(SpecOf(step, groups)).status;
}

void Train(JobHarness* job, uint64_t first, uint64_t last) {
  for (uint64_t step = first; step <= last; ++step) {
    ASSERT_EQ(TryStep(job, step), absl::OkStatus()) << step;
  }
}

const v1::StateArray kArrays[] = {
    v1::STATE_ARRAY_MASTER, v1::STATE_ARRAY_STATE_0, v1::STATE_ARRAY_STATE_1};

// Everything that a checkpoint has of elements, by array and parameter.
std::vector<Tensors> Checkpoint(JobHarness* job) {
  std::vector<Tensors> arrays;
  for (const v1::StateArray array : kArrays) {
    Tensors values;
    for (uint32_t p = 0; p < job->layout().parameters().size(); ++p) {
      values.push_back(job->Fetch(array, p));
    }
    arrays.push_back(values);
  }
  return arrays;
}

absl::Status Load(JobHarness* job, const std::vector<Tensors>& arrays) {
  absl::Status begun = job->job().BeginLoad(0);
  if (!begun.ok()) return begun;
  for (size_t k = 0; k < arrays.size(); ++k) {
    for (uint32_t p = 0; p < arrays[k].size(); ++p) {
      absl::Status loaded = job->LoadArray(0, kArrays[k], p, arrays[k][p]);
      if (!loaded.ok()) return loaded;
    }
  }
  return job->FinishAll().status;
}

// Returns values that no step brings.
std::vector<Tensors> OtherValues(JobHarness* job) {
  std::vector<Tensors> arrays;
  for (size_t k = 0; k < std::size(kArrays); ++k) {
    arrays.push_back(job->RandomTensors(kSeed + 100 + k));
  }
  for (std::vector<float>& tensor : arrays[2]) {
    for (float& value : tensor) value = std::abs(value);
  }
  return arrays;
}

uint64_t DamagedRecords(JobHarness* job) {
  uint64_t damaged = 0;
  EXPECT_EQ(job->job().Verify([&](const v1::VerifyJobProgress& progress) {
    damaged = progress.damaged();
    return true;
  }),
            absl::OkStatus());
  return damaged;
}

class JobDamageTest : public testing::Test {
 protected:
  JobDamageTest()
      : job_(SetupOf(v1::PLACEMENT_NVME)),
        in_memory_(SetupOf(v1::PLACEMENT_HOST)) {
    for (JobHarness* job : {&job_, &in_memory_}) {
      job->Start(job->RandomTensors(kSeed));
      Train(job, 1, 2);
    }
    slot_bytes_ = Describe().disk().frame_bytes();
  }
  ~JobDamageTest() override {
    writes_fail = false;
    flushes_fail = false;
  }

  v1::Job Describe() { return job_.job().Describe(); }
  // Loads these arrays, and does not finish.
  absl::Status BeginLoad(const std::vector<Tensors>& arrays) {
    absl::Status status = job_.job().BeginLoad(0);
    for (size_t k = 0; k < arrays.size(); ++k) {
      for (uint32_t p = 0; p < arrays[k].size() && status.ok(); ++p) {
        status = job_.LoadArray(0, kArrays[k], p, arrays[k][p]);
      }
    }
    return status;
  }
  // Damages a bit of both slots of every record.
  void DamageAll() { Damage(0, kRecords); }
  void Damage(uint64_t first, uint64_t end) {
    const std::string path = job_.disk() + "/jobs/test/records";
    const auto slot_bytes = static_cast<off_t>(slot_bytes_);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0) << path;
    for (uint64_t slot = 2 * first; slot < 2 * end; ++slot) {
      const off_t at = static_cast<off_t>(slot) * slot_bytes + 100;
      char byte = 0;
      ASSERT_EQ(::pread(fd, &byte, 1, at), 1);
      byte = static_cast<char>(byte ^ 4);
      ASSERT_EQ(::pwrite(fd, &byte, 1, at), 1);
    }
    ::close(fd);
  }
  // Starts the next engine, whose ranks attach.
  void Recover() {
    job_.Close();
    ASSERT_EQ(job_.Open(), absl::OkStatus());
    job_.AttachAll();
  }

  JobHarness job_;
  JobHarness in_memory_;
  uint64_t slot_bytes_ = 0;
};

TEST_F(JobDamageTest, AJobThatFailedAtADamagedRecordIsLoadedAnew) {
  DamageAll();
  const absl::Status failed = TryStep(&job_, 3);
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_FAILED);
  // Arrays that the load leaves out are those of a new job.
  const Tensors masters = job_.RandomTensors(kSeed + 100);
  ASSERT_EQ(Load(&job_, {masters}), absl::OkStatus());
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(DamagedRecords(&job_), 0u);
  for (uint32_t p = 0; p < masters.size(); ++p) {
    EXPECT_EQ(job_.Fetch(v1::STATE_ARRAY_MASTER, p), masters[p]);
    for (const v1::StateArray array :
         {v1::STATE_ARRAY_STATE_0, v1::STATE_ARRAY_STATE_1}) {
      EXPECT_EQ(job_.Fetch(array, p), std::vector<float>(masters[p].size()));
    }
  }
  Train(&job_, Describe().committed_step() + 1,
        Describe().committed_step() + 2);
}

// The job has no parameters without that record, and is not opened; nor are any
// taken from ranks in its place. It is as it was when the disk reads again.
TEST_F(JobDamageTest, AfterALossOfPowerADamagedRecordKeepsTheJobClosed) {
  job_.Close();
  job_.DropMemory();
  Damage(1, 2);
  for (int attempt = 0; attempt < 2; ++attempt) {
    const absl::Status refused = job_.Open();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr(job_.disk() + "/jobs/test/records"),
                      HasSubstr("parameters \"a\" to \"a\""),
                      HasSubstr("optctl recover test tries again"),
                      HasSubstr("optctl delete job test")));
  }
  Damage(1, 2);  // puts the bits right
  ASSERT_EQ(job_.Open(), absl::OkStatus());
  job_.AttachAll();
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(Describe().committed_step(), 2u);
  for (JobHarness* job : {&job_, &in_memory_}) Train(job, 3, 4);
  EXPECT_EQ(job_.StateBytes(), in_memory_.StateBytes());
}

TEST_F(JobDamageTest, ACheckpointReplacesWhatVerifyHasFound) {
  const std::vector<Tensors> checkpoint = Checkpoint(&job_);
  DamageAll();
  ASSERT_GT(DamagedRecords(&job_), 0u);
  ASSERT_EQ(Load(&job_, checkpoint), absl::OkStatus());
  EXPECT_EQ(DamagedRecords(&job_), 0u);
  for (JobHarness* job : {&job_, &in_memory_}) Train(job, 3, 5);
  EXPECT_EQ(job_.StateBytes(), in_memory_.StateBytes());
}

// Parameters that are their own masters are in memory, and whole.
TEST_F(JobDamageTest, ALoadWithoutMastersThatAreInMemoryReplacesARecord) {
  const std::vector<Tensors> checkpoint = Checkpoint(&job_);
  DamageAll();
  ASSERT_GT(DamagedRecords(&job_), 0u);
  ASSERT_EQ(job_.job().BeginLoad(0), absl::OkStatus());
  for (size_t k = 1; k < checkpoint.size(); ++k) {
    for (uint32_t p = 0; p < checkpoint[k].size(); ++p) {
      ASSERT_EQ(job_.LoadArray(0, kArrays[k], p, checkpoint[k][p]),
                absl::OkStatus());
    }
  }
  ASSERT_EQ(job_.FinishAll().status, absl::OkStatus());
  EXPECT_EQ(DamagedRecords(&job_), 0u);
  for (JobHarness* job : {&job_, &in_memory_}) Train(job, 3, 5);
  EXPECT_EQ(job_.StateBytes(), in_memory_.StateBytes());
}

// The records can still be read when their values are compared. One of them is
// in memory until the others, as they are replaced, drive it out.
TEST_F(JobDamageTest, DamageIsFoundAsALoadIsPutIntoPlace) {
  for (const bool one_is_in_memory : {false, true}) {
    const std::vector<Tensors> arrays = OtherValues(&job_);
    ASSERT_EQ(BeginLoad(arrays), absl::OkStatus());
    if (one_is_in_memory) {
      std::vector<float> part(16);
      ASSERT_TRUE(
          job_.job()
              .Fetch(v1::STATE_ARRAY_STATE_0, 0, kSubGroup, part.size(),
                     absl::MakeSpan(reinterpret_cast<std::byte*>(part.data()),
                                    part.size() * sizeof(float)))
              .ok());
    }
    DamageAll();
    ASSERT_EQ(job_.FinishAll().status, absl::OkStatus());
    EXPECT_EQ(DamagedRecords(&job_), 0u);
    EXPECT_EQ(Checkpoint(&job_), arrays);
    ASSERT_EQ(Load(&job_, Checkpoint(&in_memory_)), absl::OkStatus());
  }
}

// Equal values were left out when the damage is found: the job stays as it is,
// and the same load made again replaces the records.
TEST_F(JobDamageTest, DamageIsFoundInTheMiddleOfALoad) {
  const std::vector<Tensors> checkpoint = Checkpoint(&job_);
  ASSERT_EQ(BeginLoad({checkpoint[0]}), absl::OkStatus());
  Damage(0, 1);
  const absl::Status found = job_.LoadArray(0, kArrays[1], 0, checkpoint[1][0]);
  EXPECT_TRUE(absl::IsAborted(found)) << found;
  EXPECT_THAT(std::string(found.message()), HasSubstr("load again"));
  EXPECT_EQ(Describe().open_load(), "") << "it is over for all ranks";
  EXPECT_EQ(job_.LoadArray(0, kArrays[1], 0, checkpoint[1][0]), found);
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_READY);
  ASSERT_EQ(Load(&job_, checkpoint), absl::OkStatus());
  EXPECT_EQ(DamagedRecords(&job_), 0u);
  for (JobHarness* job : {&job_, &in_memory_}) Train(job, 3, 5);
  EXPECT_EQ(job_.StateBytes(), in_memory_.StateBytes());
}

TEST_F(JobDamageTest, DamageIsFoundBeforeALoadIsSealed) {
  std::vector<Tensors> arrays = Checkpoint(&job_);
  arrays[1] = OtherValues(&job_)[1];
  ASSERT_EQ(BeginLoad(arrays), absl::OkStatus());
  Damage(0, 1);
  const absl::Status found = job_.FinishAll().status;
  EXPECT_TRUE(absl::IsAborted(found)) << found;
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(Describe().open_load(), "");
  ASSERT_EQ(Load(&job_, arrays), absl::OkStatus());
  EXPECT_EQ(DamagedRecords(&job_), 0u);
  EXPECT_EQ(Checkpoint(&job_), arrays);
}

TEST_F(JobDamageTest, ALoadThatLeavesOutAPartOfADamagedRecordFailsTheJob) {
  DamageAll();
  const Tensors masters = job_.RandomTensors(kSeed + 100);
  const absl::Status failed = Load(&job_, {masters});
  EXPECT_TRUE(absl::IsDataLoss(failed)) << failed;
  EXPECT_THAT(std::string(failed.message()), HasSubstr("load the job anew"));
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_FAILED);
  ASSERT_EQ(Load(&job_, {masters}), absl::OkStatus());
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_READY);
  Train(&job_, 3, 4);
}

// Only the sync after step 3 fails: the next engine has that step.
TEST_F(JobDamageTest, ALoadIntoAStoreThatHasEndedGivesNothingUp) {
  flushes_fail = true;
  EXPECT_FALSE(TryStep(&job_, 3).ok());
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_FAILED);
  const std::string reason = Describe().reason();
  const absl::Status refused = job_.job().BeginLoad(0);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("optctl recover test"));
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_FAILED);
  EXPECT_EQ(Describe().reason(), reason);
  flushes_fail = false;
  Recover();
  Train(&in_memory_, 3, 3);
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(Describe().committed_step(), 3u);
  EXPECT_EQ(job_.StateBytes(), in_memory_.StateBytes());
}

// The load that all ranks have finished is in its log.
TEST_F(JobDamageTest, ALoadIntoAStoreThatHasEndedKeepsTheOneBefore) {
  const Tensors masters = job_.RandomTensors(kSeed + 100);
  ASSERT_EQ(job_.job().BeginLoad(0), absl::OkStatus());
  for (uint32_t p = 0; p < masters.size(); ++p) {
    ASSERT_EQ(job_.LoadMaster(0, p, masters[p]), absl::OkStatus());
  }
  writes_fail = true;
  EXPECT_FALSE(job_.FinishAll().status.ok());
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_FAILED);
  EXPECT_FALSE(job_.job().BeginLoad(0).ok());
  writes_fail = false;
  Recover();
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_READY);
  ASSERT_EQ(Load(&in_memory_, {masters}), absl::OkStatus());
  EXPECT_EQ(job_.StateBytes(), in_memory_.StateBytes());
}

// When the disk fails while the state is being cleared, the job says so, and is
// loaded in the next engine.
TEST_F(JobDamageTest, AJobWhoseStateCannotBeClearedStaysFailed) {
  DamageAll();
  EXPECT_TRUE(absl::IsDataLoss(TryStep(&job_, 3)));
  writes_fail = true;
  EXPECT_FALSE(job_.job().BeginLoad(0).ok());
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(Describe().reason(), HasSubstr("the start of a load"));
  writes_fail = false;
  Recover();
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_LOADING);
  const Tensors masters = job_.RandomTensors(kSeed + 100);
  ASSERT_EQ(Load(&job_, {masters}), absl::OkStatus());
  EXPECT_EQ(Describe().phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(job_.Fetch(v1::STATE_ARRAY_STATE_0, 0),
            std::vector<float>(masters[0].size()));
}

}  // namespace
}  // namespace optstate::session
