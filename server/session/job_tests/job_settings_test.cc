// Settings of a job that are changed while it trains.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/job_description.h"
#include "server/session/testing/job_harness.h"
#include "storage/format/checked_file.h"
#include "storage/persist_in_order.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kSeed = 11;
constexpr uint64_t kSubGroup = 8192;
constexpr uint64_t kRecords = 12;

JobHarness::Setup SetupOf(v1::Placement placement,
                          v1::DurabilityKind durability) {
  JobHarness::Setup setup;
  setup.layout.groups.resize(1);
  setup.layout.parameters = {MakeParameter("a", 7 * kSubGroup),
                             MakeParameter("b", 5 * kSubGroup)};
  setup.subgroup_elements = kSubGroup;
  setup.storage.set_placement(placement);
  setup.storage.set_durability(durability);
  if (durability == v1::DURABILITY_KIND_EVERY) {
    setup.storage.set_every_steps(2);
  }
  if (placement == v1::PLACEMENT_NVME) {
    setup.storage.set_host_budget_bytes(1 << 20);
  }
  return setup;
}

void Train(JobHarness* job, uint64_t first, uint64_t last) {
  const std::vector<Hyperparams> groups(
      1, DefaultHyperparams(job->layout().optimizer()));
  for (uint64_t step = first; step <= last; ++step) {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    job->Step(step, job->RandomTensors(kSeed + step), spec);
  }
}

v1::DiskState DiskOf(JobHarness* job) { return job->job().Describe().disk(); }

absl::StatusOr<v1::SetJobReply> SetFrames(JobHarness* job, uint64_t frames) {
  v1::SetJobRequest request;
  request.set_host_budget_bytes(frames * DiskOf(job).frame_bytes());
  return job->job().Set(request);
}

uint64_t FramesFileBytes(const JobHarness& job) {
  return std::filesystem::file_size(job.directory() + "/state/frames");
}

class JobSettingsTest : public testing::TestWithParam<v1::DurabilityKind> {
 protected:
  JobHarness in_memory_{
      SetupOf(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_UNSPECIFIED)};
  JobHarness swapped_{SetupOf(v1::PLACEMENT_NVME, GetParam())};

  void StartBoth() {
    for (JobHarness* job : {&in_memory_, &swapped_}) {
      job->Start(job->RandomTensors(kSeed));
      Train(job, 1, 2);
    }
  }
};

TEST_P(JobSettingsTest, TheBudgetChangesBetweenStepsAndTheBitsDoNot) {
  StartBoth();
  uint64_t step = 2;
  for (const uint64_t frames : {3, 12, 5, 4, 9, 3, 1000}) {
    const auto reply = SetFrames(&swapped_, frames);
    ASSERT_TRUE(reply.ok()) << reply.status();
    const uint64_t in_use = std::min(frames, kRecords);
    EXPECT_EQ(reply->frames(), in_use);
    EXPECT_EQ(reply->records(), kRecords);
    EXPECT_EQ(DiskOf(&swapped_).frames(), in_use);
    EXPECT_EQ(FramesFileBytes(swapped_),
              in_use * DiskOf(&swapped_).frame_bytes());
    for (JobHarness* job : {&in_memory_, &swapped_}) {
      Train(job, step + 1, step + 2);
    }
    step += 2;
    EXPECT_EQ(swapped_.StateBytes(), in_memory_.StateBytes()) << frames;
  }
}

// An operator does not wait for a step that is open.
TEST_P(JobSettingsTest, TheBudgetChangesWhileAnotherThreadTrains) {
  StartBoth();
  constexpr uint64_t kLast = 60;
  std::atomic<bool> trained = false;
  int changes = 0;
  std::thread operator_thread([&] {
    std::mt19937_64 random(kSeed);
    while (!trained || changes == 0) {
      const auto reply = SetFrames(&swapped_, 3 + random() % 10);
      ASSERT_TRUE(reply.ok()) << reply.status();
      ++changes;
    }
  });
  for (JobHarness* job : {&in_memory_, &swapped_}) Train(job, 3, kLast);
  trained = true;
  operator_thread.join();
  EXPECT_EQ(swapped_.StateBytes(), in_memory_.StateBytes());
}

TEST_P(JobSettingsTest, TheNextEngineHasTheBudgetAndScriptsMayAskForEither) {
  StartBoth();
  ASSERT_TRUE(SetFrames(&swapped_, 5).ok());
  const uint64_t set = 5 * DiskOf(&swapped_).frame_bytes();
  swapped_.Close();
  ASSERT_TRUE(swapped_.Open().ok());
  EXPECT_EQ(DiskOf(&swapped_).frames(), 5);
  EXPECT_EQ(swapped_.job().Describe().storage().host_budget_bytes(), set);
  const uint64_t made = swapped_.setup().storage.host_budget_bytes();
  for (const uint64_t asked : {made, set, uint64_t{0}}) {
    swapped_.setup().storage.set_host_budget_bytes(asked);
    const auto registered = swapped_.Register(0);
    EXPECT_TRUE(registered.ok()) << registered.status();
  }
  swapped_.setup().storage.set_host_budget_bytes(made + 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(swapped_.Register(0).status()));
  swapped_.setup().storage.set_host_budget_bytes(made);
  swapped_.AttachAll();
  for (JobHarness* job : {&in_memory_, &swapped_}) Train(job, 3, 4);
  EXPECT_EQ(swapped_.StateBytes(), in_memory_.StateBytes());
  if (GetParam() != v1::DURABILITY_KIND_STEP) return;
  // A commit carries it too.
  swapped_.Close();
  swapped_.DropMemory();
  ASSERT_TRUE(swapped_.Open().ok());
  EXPECT_EQ(DiskOf(&swapped_).frames(), 5);
  EXPECT_EQ(swapped_.StateBytes(), in_memory_.StateBytes());
}

// A job, the bytes of an element in its frames, and the frames that a budget
// becomes.
struct BudgetCase {
  const char* name;
  DType dtype;
  MasterFormat master;
  uint64_t element_bytes;  // with durability none
  uint64_t frames[3];      // of kBudgets
  uint64_t durable_element_bytes;
  uint64_t durable_frames[3];
};
constexpr uint64_t kBudgets[] = {500'000, 400'000, 600'000};
constexpr BudgetCase kBudgetCases[] = {{"float32",
                                        DType::kFloat32,
                                        MasterFormat::kFloat32,
                                        8,
                                        {7, 6, 9},
                                        12,
                                        {5, 4, 6}},
                                       {"bfloat16",
                                        DType::kBFloat16,
                                        MasterFormat::kFloat32,
                                        12,
                                        {5, 4, 6},
                                        12,
                                        {5, 4, 6}},
                                       {"split",
                                        DType::kBFloat16,
                                        MasterFormat::kSplit,
                                        10,
                                        {6, 4, 7},
                                        12,
                                        {5, 4, 6}}};

// A new job, a live change and the next engine agree on the number: as many
// whole frames as the budget has room for.
TEST_P(JobSettingsTest, ABudgetBecomesAsManyFramesAsItHolds) {
  const bool is_durable = GetParam() != v1::DURABILITY_KIND_NONE;
  for (const BudgetCase& of : kBudgetCases) {
    JobHarness::Setup setup = SetupOf(v1::PLACEMENT_NVME, GetParam());
    setup.layout.master_format = of.master;
    for (ParameterSpec& parameter : setup.layout.parameters) {
      parameter.dtype = of.dtype;
    }
    setup.storage.set_host_budget_bytes(kBudgets[0]);
    JobHarness job(setup);
    job.Start(job.RandomTensors(kSeed));
    const uint64_t frame_bytes =
        kSubGroup * (is_durable ? of.durable_element_bytes : of.element_bytes);
    for (size_t i = 0; i < std::size(kBudgets); ++i) {
      SCOPED_TRACE(absl::StrCat(of.name, ", ", kBudgets[i], " bytes"));
      if (i > 0) {
        v1::SetJobRequest request;
        request.set_host_budget_bytes(kBudgets[i]);
        const auto reply = job.job().Set(request);
        ASSERT_TRUE(reply.ok()) << reply.status();
      }
      const uint64_t frames = is_durable ? of.durable_frames[i] : of.frames[i];
      ASSERT_EQ(frames, kBudgets[i] / frame_bytes) << "the case is wrong";
      for (const bool is_reopened : {false, true}) {
        if (is_reopened) {
          job.Close();
          ASSERT_TRUE(job.Open().ok());
        }
        EXPECT_EQ(DiskOf(&job).frame_bytes(), frame_bytes) << is_reopened;
        EXPECT_EQ(DiskOf(&job).frames(), frames) << is_reopened;
        EXPECT_EQ(FramesFileBytes(job), frames * frame_bytes) << is_reopened;
      }
    }
  }
}

// Leaves what an engine leaves that died once the description named fewer
// frames.
TEST_P(JobSettingsTest, TheNextEngineGivesUpFramesThatAreNotDescribed) {
  StartBoth();
  const uint64_t frame_bytes = DiskOf(&swapped_).frame_bytes();
  ASSERT_EQ(FramesFileBytes(swapped_),
            DiskOf(&swapped_).frames() * frame_bytes);
  ASSERT_GT(DiskOf(&swapped_).frames(), 4);
  swapped_.Close();
  const std::string path = swapped_.directory() + "/state/job.binpb";
  auto file = storage::ReadCheckedFile(path);
  ASSERT_TRUE(file.ok()) << file.status();
  auto description = ParseDescription(file->payload);
  ASSERT_TRUE(description.ok()) << description.status();
  description->storage.set_host_budget_bytes(4 * frame_bytes);
  file->payload = SerializeDescription(*description);
  ASSERT_TRUE(storage::WriteCheckedFile(path, *file).ok());
  ASSERT_TRUE(swapped_.Open().ok());
  EXPECT_EQ(DiskOf(&swapped_).frames(), 4);
  EXPECT_EQ(FramesFileBytes(swapped_), 4 * frame_bytes);
  EXPECT_EQ(swapped_.StateBytes(), in_memory_.StateBytes());
}

std::atomic<int> points_left = 0;
void DieAtPoint(storage::PersistPoint /*point*/) {
  if (--points_left == 0) ::kill(::getpid(), SIGKILL);
}

// The engine is killed at one store after another of a change.
TEST_P(JobSettingsTest, AKilledEngineLeavesEveryByte) {
  StartBoth();
  swapped_.setup().workers = 1;
  int killed = 0;
  uint64_t step = 2;
  for (int point = 1; point <= 24; ++point) {
    const uint64_t frames = point % 2 == 0 ? kRecords : 3;
    swapped_.Close();  // no threads in this process when it forks
    in_memory_.Close();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      if (!swapped_.Open().ok()) ::_exit(3);
      swapped_.AttachAll();
      Train(&swapped_, step + 1, step + 1);  // records differ from the disk
      points_left = point;
      storage::persist_hook.store(&DieAtPoint);
      ::_exit(SetFrames(&swapped_, frames).ok() ? 0 : 4);
    }
    ++step;
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) {
      ++killed;
    } else {
      ASSERT_EQ(WEXITSTATUS(status), 0) << "point " << point;
    }
    ASSERT_TRUE(in_memory_.Open().ok());
    in_memory_.AttachAll();
    Train(&in_memory_, step, step);
    ASSERT_TRUE(swapped_.Open().ok()) << "point " << point;
    EXPECT_EQ(FramesFileBytes(swapped_),
              DiskOf(&swapped_).frames() * DiskOf(&swapped_).frame_bytes());
    ASSERT_EQ(swapped_.StateBytes(), in_memory_.StateBytes())
        << "point " << point;
  }
  EXPECT_GT(killed, 8);
}

TEST_P(JobSettingsTest, ABudgetThatCannotBeIsRefusedWithFigures) {
  StartBoth();
  const v1::DiskState disk = DiskOf(&swapped_);
  const absl::Status small = SetFrames(&swapped_, 2).status();
  EXPECT_TRUE(absl::IsInvalidArgument(small)) << small;
  EXPECT_THAT(
      std::string(small.message()),
      HasSubstr(absl::StrCat(
          "room for 2 of the job's records of ", disk.frame_bytes(),
          " bytes; it must hold 3: set at least ", 3 * disk.frame_bytes())));
  ASSERT_TRUE(SetFrames(&swapped_, 3).ok());
  v1::Limits limits;
  limits.set_job_state_bytes_max(swapped_.job().Describe().state_bytes() +
                                 disk.frame_bytes() / 2);
  swapped_.job().SetLimits(limits);
  const absl::Status large = SetFrames(&swapped_, 4).status();
  EXPECT_TRUE(absl::IsResourceExhausted(large)) << large;
  EXPECT_THAT(std::string(large.message()),
              HasSubstr("limits.job_state_bytes_max"));
  EXPECT_EQ(DiskOf(&swapped_).frames(), 3);
  EXPECT_EQ(swapped_.job().Describe().storage().host_budget_bytes(),
            3 * disk.frame_bytes());
}

TEST_P(JobSettingsTest, WhatAJobHasNotIsRefusedWithWhatToDo) {
  v1::SetJobRequest request;
  request.set_host_budget_bytes(1 << 30);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      swapped_.job().Set(request).status()));  // no layout yet
  StartBoth();
  const absl::Status host = in_memory_.job().Set(request).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(host)) << host;
  EXPECT_THAT(std::string(host.message()),
              AllOf(HasSubstr("this job lies in memory whole"),
                    HasSubstr("placement=\"nvme\"")));
  EXPECT_TRUE(absl::IsInvalidArgument(swapped_.job().Set({}).status()));
  swapped_.job().BeginDrain();
  EXPECT_TRUE(absl::IsFailedPrecondition(swapped_.job().Set(request).status()));
}

TEST_P(JobSettingsTest, ADurableJobIsDurableAsOftenAsIsSet) {
  StartBoth();
  v1::SetJobRequest request;
  request.set_durability(v1::DURABILITY_KIND_EVERY);
  const auto without_steps = swapped_.job().Set(request).status();
  EXPECT_TRUE(absl::IsInvalidArgument(without_steps)) << without_steps;
  request.set_every_steps(3);
  const auto reply = swapped_.job().Set(request);
  if (GetParam() == v1::DURABILITY_KIND_NONE) {
    EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
    return;
  }
  ASSERT_TRUE(reply.ok()) << reply.status();
  const uint64_t before = DiskOf(&swapped_).commits();
  Train(&swapped_, 3, 11);
  // Steps 4, 6, 8 and 10; a commit waits for the one before.
  const uint64_t commits = DiskOf(&swapped_).commits() - before;
  EXPECT_GE(commits, 3);
  EXPECT_LE(commits, 5);
  swapped_.Close();
  ASSERT_TRUE(swapped_.Open().ok());
  EXPECT_EQ(swapped_.job().Describe().storage().every_steps(), 3);
  request.set_durability(v1::DURABILITY_KIND_NONE);
  EXPECT_TRUE(absl::IsFailedPrecondition(swapped_.job().Set(request).status()));
}

INSTANTIATE_TEST_SUITE_P(
    Durabilities, JobSettingsTest,
    testing::Values(v1::DURABILITY_KIND_NONE, v1::DURABILITY_KIND_STEP,
                    v1::DURABILITY_KIND_EVERY),
    [](const testing::TestParamInfo<v1::DurabilityKind>& tested) {
      switch (tested.param) {
        case v1::DURABILITY_KIND_NONE:
          return "None";
        case v1::DURABILITY_KIND_STEP:
          return "Step";
        default:
          return "Every";
      }
    });

}  // namespace
}  // namespace optstate::session
