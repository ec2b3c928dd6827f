// An engine dies at chosen instants of a load, in a process of its own; or the
// files that it left are damaged.

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_crash_fixture.h"
#include "storage/format/control_file.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

enum class LoadInstant {
  kBegun,
  kLoadedByOne,
  kLoadedByAll,
  kFinishedByOne,
  kSealed,
  kFirstPart,
  kLaterPart,
  kApplied,
  kRecorded,
};

void Die() { ::kill(::getpid(), SIGKILL); }

class LoadKiller final : public scheduler::StepObserver {
 public:
  explicit LoadKiller(LoadInstant instant) : instant_(instant) {}
  void OnLoadSealed() override { At(LoadInstant::kSealed); }
  void OnLoadPartApplied() override {
    At(LoadInstant::kFirstPart);
    if (++parts_ == 3) At(LoadInstant::kLaterPart);
  }
  void OnLoadApplied() override { At(LoadInstant::kApplied); }
  void OnLoadRecorded() override { At(LoadInstant::kRecorded); }

 private:
  void At(LoadInstant instant) {
    if (instant == instant_) Die();
  }

  const LoadInstant instant_;
  std::atomic<int> parts_{0};
};

JobHarness::Setup InSmallFormats() {
  JobHarness::Setup setup = TwoRanks();
  setup.layout.state_format = StateFormat::kDynamic8;
  setup.layout.master_format = MasterFormat::kSplit;
  return setup;
}

class LoadCrashTest : public JobCrashTest {
 protected:
  explicit LoadCrashTest(const JobHarness::Setup& setup = TwoRanks())
      : JobCrashTest(setup) {
    JobHarness undisturbed(setup);
    StartAt2(&undisturbed);
    LoadAll(&undisturbed);
    loaded_ = undisturbed.StateBytes();
  }

  static void LoadPart(JobHarness* harness, uint32_t rank) {
    const Tensors values = harness->RandomTensors(99);
    for (uint32_t p = 0; p < values.size(); ++p) {
      for (const auto array : {v1::STATE_ARRAY_STATE_0, v1::STATE_ARRAY_STATE_1,
                               v1::STATE_ARRAY_MASTER}) {
        // This includes a split master or one beside a parameter.
        if (!harness->LoadArray(rank, array, p, values[p]).ok()) ::_exit(3);
      }
    }
    const std::vector<int64_t> counts = {5, 0, 6};
    if (!harness->job()
             .Load(rank, v1::STATE_ARRAY_STEP_COUNT, 0, 0, 3, DType::kFloat32,
                   absl::MakeConstSpan(
                       reinterpret_cast<const std::byte*>(counts.data()), 24))
             .ok()) {
      ::_exit(4);
    }
  }
  static void LoadAll(JobHarness* harness,
                      LoadInstant instant = LoadInstant::kRecorded) {
    const auto die_at = [instant](LoadInstant here) {
      if (here == instant) Die();
    };
    for (uint32_t rank = 0; rank < 2; ++rank) {
      if (!harness->job().BeginLoad(rank).ok()) ::_exit(5);
    }
    die_at(LoadInstant::kBegun);
    LoadPart(harness, 0);
    die_at(LoadInstant::kLoadedByOne);
    LoadPart(harness, 1);
    die_at(LoadInstant::kLoadedByAll);
    harness->job().FinishLoad(0, 1000, {});
    die_at(LoadInstant::kFinishedByOne);
    harness->job().FinishLoad(1, 1001, {});
  }
  void DieInLoad(LoadInstant instant) {
    DieIn([&] {
      LoadKiller killer(instant);
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      LoadAll(&harness_, instant);
    });
  }
  uint32_t LoadsFinished() {
    harness_.DetachAll();
    EXPECT_TRUE(harness_.Register(0).ok());
    const auto attached = harness_.Attach(0);
    EXPECT_TRUE(attached.ok());
    return attached->loads_finished;
  }
  void ExpectHas(const std::string& state, uint32_t loads_finished) {
    EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
    EXPECT_EQ(committed_step(), 2);
    EXPECT_TRUE(harness_.StateBytes() == state);
    EXPECT_FALSE(fs::exists(LogPath()));
    EXPECT_EQ(LoadsFinished(), loads_finished);
  }
  // Expects that the job goes on with further loads.
  void ExpectLoads() {
    harness_.DetachAll();
    harness_.AttachAll();
    LoadAll(&harness_);
    EXPECT_TRUE(harness_.StateBytes() == loaded_);
    harness_.Step(3, harness_.RandomTensors(3), CommitOf(3));
  }
  // Returns where the load waits: on the job's disk if its records are there.
  std::string LogPath() {
    return harness_.setup().storage.placement() == v1::PLACEMENT_NVME
               ? harness_.disk() + "/jobs/test/load"
               : Path("load");
  }
  void ChangeLog(int64_t offset) {
    const int fd = ::open(LogPath().c_str(), O_RDWR | O_CLOEXEC);
    char byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, offset), 1);
    byte = static_cast<char>(byte ^ 0x10);
    ASSERT_EQ(::pwrite(fd, &byte, 1, offset), 1);
    ::close(fd);
  }
  void ExpectFailed(const std::string& text) {
    ASSERT_TRUE(harness_.Open().ok());
    const v1::Job job = harness_.job().Describe();
    EXPECT_EQ(job.phase(), v1::JOB_PHASE_FAILED);
    EXPECT_THAT(job.reason(), AllOf(HasSubstr(LogPath()), HasSubstr(text),
                                    HasSubstr("Last good step: 2"),
                                    HasSubstr("optctl delete job test")));
    EXPECT_EQ(harness_.Attach(0).status().code(), absl::StatusCode::kDataLoss);
    harness_.Close();
  }
  // Applies `change` to the control file that the next engine finds.
  void ChangeControl(
      const std::function<void(storage::ControlFile*)>& change) const {
    std::fstream file(Path("control"),
                      std::ios::in | std::ios::out | std::ios::binary);
    std::vector<char> bytes(sizeof(storage::ControlFile));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    change(reinterpret_cast<storage::ControlFile*>(bytes.data()));
    file.seekp(0);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

  std::string loaded_;
};

class DiesInLoad : public LoadCrashTest,
                   public ::testing::WithParamInterface<LoadInstant> {
 protected:
  using LoadCrashTest::LoadCrashTest;
  bool is_sealed() const { return GetParam() >= LoadInstant::kSealed; }
  void Check() {
    DieInLoad(GetParam());
    EXPECT_EQ(fs::exists(LogPath()), GetParam() > LoadInstant::kBegun);
    ASSERT_TRUE(harness_.Open().ok());
    ExpectHas(is_sealed() ? loaded_ : committed_, is_sealed() ? 2 : 1);
    ExpectLoads();
  }
};

TEST_P(DiesInLoad, TheJobHasAllOfItOrNothing) { Check(); }

// Engines die repeatedly while the load is installed again.
TEST_P(DiesInLoad, DeathsWhileItIsFinished) {
  if (!is_sealed()) GTEST_SKIP() << "it is dropped";
  DieInLoad(GetParam());
  for (const LoadInstant again :
       {LoadInstant::kFirstPart, LoadInstant::kLaterPart,
        LoadInstant::kFirstPart}) {
    if (GetParam() == LoadInstant::kRecorded) break;
    DieIn([&] {
      LoadKiller killer(again);
      harness_.setup().observer = &killer;
      if (!harness_.Open().ok()) ::_exit(1);
    });
  }
  ASSERT_TRUE(harness_.Open().ok());
  ExpectHas(loaded_, 2);
}

constexpr LoadInstant kInstants[] = {
    LoadInstant::kBegun,       LoadInstant::kLoadedByOne,
    LoadInstant::kLoadedByAll, LoadInstant::kFinishedByOne,
    LoadInstant::kSealed,      LoadInstant::kFirstPart,
    LoadInstant::kLaterPart,   LoadInstant::kApplied,
    LoadInstant::kRecorded};
INSTANTIATE_TEST_SUITE_P(All, DiesInLoad, ::testing::ValuesIn(kInstants));

class DiesInSmallLoad : public DiesInLoad {
 protected:
  DiesInSmallLoad() : DiesInLoad(InSmallFormats()) {}
};
TEST_P(DiesInSmallLoad, TheJobHasAllOfItOrNothing) { Check(); }
INSTANTIATE_TEST_SUITE_P(All, DiesInSmallLoad, ::testing::ValuesIn(kInstants));

TEST_F(LoadCrashTest, ASealedLoadThatIsDamagedFailsTheJob) {
  DieInLoad(LoadInstant::kLaterPart);
  const fs::path load = LogPath();
  const fs::path kept = Path("kept");
  fs::copy(load, kept);
  const auto restore = [&] {
    fs::remove(load);
    fs::copy(kept, load);
  };
  for (const int64_t offset : {0, 8, 16, 33, 60, 100, 5000}) {
    ChangeLog(offset);
    ExpectFailed("");
    restore();
  }
  fs::resize_file(load, 5000);
  ExpectFailed("has 5000 bytes");
  fs::remove(load);
  ExpectFailed("is missing");
  std::ofstream(load) << std::string(1 << 20, 'x');
  ExpectFailed("magic");
  // The damaged file is restored: the job goes on from there.
  restore();
  ASSERT_TRUE(harness_.Open().ok());
  ExpectHas(loaded_, 2);
}

TEST_F(LoadCrashTest, ALoadThatWasNeverSealedIsDroppedHoweverItLooks) {
  DieInLoad(LoadInstant::kLoadedByAll);
  ChangeLog(0);
  ChangeLog(100);
  ASSERT_TRUE(harness_.Open().ok());
  ExpectHas(committed_, 1);
  harness_.Close();
  std::ofstream(LogPath()) << "of somebody else";
  ASSERT_TRUE(harness_.Open().ok());
  ExpectHas(committed_, 1);
}

// A former build loaded in place: an interrupted load is required again from
// where it had written, and the job is never taken for READY.
TEST_F(LoadCrashTest, WhatAnEngineOfAFormerBuildHasLeft) {
  harness_.Close();
  ChangeControl([](storage::ControlFile* control) {
    storage::StepRecord record = storage::CurrentRecord(*control);
    record.load_touched_from = 1;
    storage::PublishRecord(record, control);
  });
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_LOADING);
  harness_.AttachAll();
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.job().BeginLoad(rank).ok());
  }
  harness_.job().FinishLoad(1, 2000, {});
  const auto* refused = harness_.AnswerTo(1, 2000);
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused->status.message(), HasSubstr("\"b\" were not loaded"));
}

// A former build knows nothing of logs: it takes the record for that of a load
// in place and may go on from there, so that the log no longer fits the state.
TEST_F(LoadCrashTest, ASealedLoadThatAFormerBuildHasOpened) {
  DieInLoad(LoadInstant::kFirstPart);
  ChangeControl([](storage::ControlFile* control) {
    storage::StepRecord record = storage::CurrentRecord(*control);
    EXPECT_EQ(record.load_touched_from, 0u);
    record.load_required_from = 0;
    storage::PublishRecord(record, control);
  });
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_LOADING);
  EXPECT_FALSE(fs::exists(LogPath()));
}

// The former build died in the middle of a block of masters that it overwrote
// in place.
TEST_F(LoadCrashTest, MastersThatAFormerBuildWasOverwriting) {
  harness_.Close();
  ChangeControl([](storage::ControlFile* control) {
    control->loading_begin = 100;
    control->loading_numel = 2;
    control->loading_masters[0] = 7;
    control->loading_masters[1] = 8;
    control->parameter_loading.store(1 + 1);
  });
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(phase(), v1::JOB_PHASE_READY);
  const std::vector<float> masters = harness_.Fetch(v1::STATE_ARRAY_MASTER, 1);
  EXPECT_EQ(masters[100], 7);
  EXPECT_EQ(masters[101], 8);
  EXPECT_EQ(harness_.Parameter(1)[101], 8);
}

}  // namespace
}  // namespace optstate::session
