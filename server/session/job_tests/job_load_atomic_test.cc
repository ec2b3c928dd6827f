// Tests that a load into a job with a state applies all of its values or none,
// and writes no equal values.

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_harness.h"

int RealFallocate(int fd, off_t offset,
                  off_t bytes) asm("__real_posix_fallocate");
int WrappedFallocate(int fd, off_t offset,
                     off_t bytes) asm("__wrap_posix_fallocate");

namespace {

// Bytes of a file beyond this one cannot be allocated; -1: no limit.
off_t no_space_beyond = -1;

}  // namespace

int WrappedFallocate(int fd, off_t offset, off_t bytes) {
  if (no_space_beyond >= 0 && offset + bytes > no_space_beyond) return ENOSPC;
  return RealFallocate(fd, offset, bytes);
}

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

constexpr auto kMaster = v1::STATE_ARRAY_MASTER;
constexpr auto kExpAvg = v1::STATE_ARRAY_STATE_0;
constexpr auto kExpAvgSq = v1::STATE_ARRAY_STATE_1;

// Returns the files of a job's state, except those that record its progress,
// and those of records that are evicted, or lag behind devices: they hold what
// was written back last.
std::map<std::string, std::string> FilesOf(const JobHarness& harness) {
  const bool has_records = ::getenv("OPTSTATE_TEST_STORE") == nullptr &&
                           ::getenv("OPTSTATE_TEST_DEVICE_BUDGET") == nullptr;
  std::map<std::string, std::string> files;
  for (const auto& entry :
       fs::directory_iterator(harness.directory() + "/state")) {
    const std::string name = entry.path().filename();
    const bool is_state = name == "parameters" ||
                          absl::StartsWith(name, "step_c") ||
                          absl::StartsWith(name, "scalars") ||
                          (has_records && (absl::StartsWith(name, "master.") ||
                                           absl::StartsWith(name, "exp_avg")));
    if (!is_state) continue;
    std::stringstream content;
    content << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    files[name] = content.str();
  }
  return files;
}

bool HasLog(const JobHarness& harness) {
  return fs::exists(harness.directory() + "/state/load") ||
         fs::exists(harness.disk() + "/jobs/test/load");
}

uint64_t LogBytes(JobHarness& harness) {
  const v1::Job job = harness.job().Describe();
  for (const v1::ArrayBytes& array : job.arrays()) {
    if (array.name() == "load") return array.bytes();
  }
  return 0;
}

struct Formats {
  const char* name;
  OptimizerKind optimizer;
  StateFormat state;
  MasterFormat master;
};

class LoadFormatsTest : public ::testing::TestWithParam<Formats> {
 protected:
  LoadFormatsTest() : harness_(SetupOf(GetParam())) {
    harness_.Start(harness_.RandomTensors(1));
    const std::vector<Hyperparams> groups(
        1, DefaultHyperparams(GetParam().optimizer));
    CommitSpec spec;
    spec.groups = groups;
    for (spec.step = 1; spec.step <= 3; ++spec.step) {
      harness_.Step(spec.step, harness_.RandomTensors(spec.step), spec);
    }
  }

  static JobHarness::Setup SetupOf(const Formats& formats) {
    JobHarness::Setup setup;
    setup.layout.optimizer = formats.optimizer;
    setup.layout.state_format = formats.state;
    setup.layout.master_format = formats.master;
    setup.layout.groups = {{}};
    setup.layout.parameters = {
        MakeParameter("a", 6000), MakeParameter("none", 0),
        MakeParameter("b", 9001, 0, DType::kBFloat16, DType::kBFloat16),
        MakeParameter("c", 300, 0,
                      formats.master == MasterFormat::kSplit
                          ? DType::kBFloat16
                          : DType::kFloat16)};
    return setup;
  }

  size_t state_arrays() const {
    size_t count = 0;  // options bring the last ones
    while (count < InfoOf(GetParam().optimizer).state_arrays.size() &&
           harness_.layout().has_state_array(static_cast<int>(count), 0)) {
      ++count;
    }
    return count;
  }
  v1::StateArray state_array(size_t k) const {
    return static_cast<v1::StateArray>(v1::STATE_ARRAY_STATE_0 + k);
  }
  absl::Status LoadNumbers(v1::StateArray array,
                           const std::vector<std::byte>& bytes) {
    return harness_.job().Load(0, array, 0, 0, bytes.size() / 8,
                               DType::kFloat32, bytes);
  }
  // Loads the job's present state into the job, in parts of this many elements.
  void LoadWhatIsThere(uint64_t part) {
    const auto parameters = harness_.layout().parameters();
    for (uint32_t p = 0; p < parameters.size(); ++p) {
      std::vector<v1::StateArray> arrays = {kMaster};
      for (size_t k = 0; k < state_arrays(); ++k) {
        arrays.push_back(state_array(k));
      }
      for (const v1::StateArray array : arrays) {
        const std::vector<float> values = harness_.Fetch(array, p);
        for (uint64_t begin = 0; begin < values.size(); begin += part) {
          const uint64_t count =
              std::min<uint64_t>(part, values.size() - begin);
          const absl::Status loaded = harness_.job().Load(
              0, array, p, begin, count, DType::kFloat32,
              absl::MakeConstSpan(
                  reinterpret_cast<const std::byte*>(values.data() + begin),
                  count * sizeof(float)));
          ASSERT_TRUE(loaded.ok()) << loaded;
        }
      }
    }
    std::vector<std::byte> numbers(parameters.size() * 8);
    for (const auto array :
         {v1::STATE_ARRAY_STEP_COUNT, v1::STATE_ARRAY_SCALAR}) {
      if (!harness_.job()
               .Fetch(array, 0, 0, parameters.size(), absl::MakeSpan(numbers))
               .ok()) {
        continue;
      }
      ASSERT_TRUE(LoadNumbers(array, numbers).ok());
    }
  }

  JobHarness harness_;
};

TEST_P(LoadFormatsTest, ALoadOfWhatTheJobHasChangesNoBitAndTakesNoMemory) {
  const auto before = FilesOf(harness_);
  for (const uint64_t part :
       {uint64_t{256}, uint64_t{1024}, uint64_t{1} << 20}) {
    ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
    LoadWhatIsThere(part);
    EXPECT_FALSE(HasLog(harness_));
    ASSERT_TRUE(harness_.FinishAll().status.ok());
    EXPECT_TRUE(FilesOf(harness_) == before);
  }
}

// Only the changed elements, or their blocks, may change bits.
TEST_P(LoadFormatsTest, WhatStaysTheSameInALoadKeepsItsBits) {
  const auto before = FilesOf(harness_);
  std::vector<float> first = harness_.Fetch(v1::STATE_ARRAY_STATE_0, 2);
  const std::vector<float> same = first;
  for (size_t i = 512; i < 768; ++i) first[i] = 0.25f;
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  LoadWhatIsThere(4096);
  ASSERT_TRUE(harness_.LoadArray(0, v1::STATE_ARRAY_STATE_0, 2, first).ok());
  EXPECT_TRUE(HasLog(harness_));
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_STATE_0, 2), same);
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_FALSE(HasLog(harness_));
  EXPECT_EQ(harness_.Fetch(v1::STATE_ARRAY_STATE_0, 2), first);
  const auto after = FilesOf(harness_);
  size_t differing = 0;
  for (const auto& [name, content] : before) {
    for (size_t i = 0; i < content.size(); ++i) {
      differing += content[i] != after.at(name)[i] ? 1 : 0;
    }
  }
  EXPECT_GT(differing, 0u);
  EXPECT_LE(differing, 256 * sizeof(float));
}

// The last loaded value counts, also when it equals the job's own.
TEST_P(LoadFormatsTest, WhatIsLoadedTwiceCountsAsItCameLast) {
  const auto before = FilesOf(harness_);
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  const Tensors other = harness_.RandomTensors(9);
  for (uint32_t p = 0; p < other.size(); ++p) {
    ASSERT_TRUE(harness_.LoadMaster(0, p, other[p]).ok());
    for (size_t k = 0; k < state_arrays(); ++k) {
      ASSERT_TRUE(harness_.LoadArray(0, state_array(k), p, other[p]).ok());
    }
  }
  const uint64_t bytes = LogBytes(harness_);
  EXPECT_GT(bytes, 0u);
  LoadWhatIsThere(768);
  EXPECT_EQ(LogBytes(harness_), bytes);
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_TRUE(FilesOf(harness_) == before);
  // When a load brings two other values, the second counts.
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  for (const uint64_t seed : {10, 11}) {
    ASSERT_TRUE(
        harness_.LoadMaster(0, 0, harness_.RandomTensors(seed)[0]).ok());
  }
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  EXPECT_EQ(harness_.Fetch(kMaster, 0), harness_.RandomTensors(11)[0]);
}

INSTANTIATE_TEST_SUITE_P(
    All, LoadFormatsTest,
    ::testing::Values(Formats{"Plain", OptimizerKind::kAdamW,
                              StateFormat::kFloat32, MasterFormat::kFloat32},
                      Formats{"SplitBFloat16", OptimizerKind::kAdamW,
                              StateFormat::kBFloat16, MasterFormat::kSplit},
                      Formats{"Dynamic8", OptimizerKind::kAdamW,
                              StateFormat::kDynamic8, MasterFormat::kSplit},
                      Formats{"Scalars", OptimizerKind::kNadam,
                              StateFormat::kDynamic8, MasterFormat::kFloat32}),
    [](const auto& param_info) { return param_info.param.name; });

JobHarness::Setup TwoRanks() {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 60000),
                             MakeParameter("b", 9000, 0, DType::kBFloat16)};
  setup.world_size = 2;
  setup.partition = PartitionMode::kContiguous;
  setup.client_instance = 20;
  return setup;
}

class AtomicLoadTest : public ::testing::Test {
 protected:
  explicit AtomicLoadTest(const JobHarness::Setup& setup = TwoRanks())
      : harness_(setup) {
    harness_.Start(harness_.RandomTensors(1));
    const std::vector<Hyperparams> groups(1, AdamHyperparams());
    CommitSpec spec;
    spec.step = 1;
    spec.groups = groups;
    harness_.Step(1, harness_.RandomTensors(2), spec);
    before_ = FilesOf(harness_);
    bytes_before_ = harness_.job().Describe().state_bytes();
  }
  ~AtomicLoadTest() override { no_space_beyond = -1; }

  absl::Status LoadPart(uint32_t rank) {
    for (uint32_t p = 0; p < other_.size(); ++p) {
      for (const auto array : {kExpAvg, kExpAvgSq, kMaster}) {
        absl::Status status = harness_.LoadArray(rank, array, p, other_[p]);
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }
  void BeginAndLoad(uint32_t rank) {
    ASSERT_TRUE(harness_.job().BeginLoad(rank).ok());
    ASSERT_TRUE(LoadPart(rank).ok());
  }
  uint64_t Finish(uint32_t rank) {
    harness_.job().FinishLoad(rank, ++request_, {});
    return request_;
  }
  absl::Status StatusOf(uint32_t rank, uint64_t request) const {
    const auto* answer = harness_.AnswerTo(rank, request);
    return answer == nullptr ? absl::UnknownError("no answer") : answer->status;
  }
  void ExpectUnchanged() {
    const v1::Job job = harness_.job().Describe();
    EXPECT_EQ(job.phase(), v1::JOB_PHASE_READY);
    EXPECT_EQ(job.open_load(), "");
    EXPECT_EQ(job.state_bytes(), bytes_before_);
    EXPECT_FALSE(HasLog(harness_));
    EXPECT_TRUE(FilesOf(harness_) == before_);
  }
  void ExpectLoaded() {
    EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_READY);
    EXPECT_FALSE(HasLog(harness_));
    for (uint32_t p = 0; p < other_.size(); ++p) {
      EXPECT_EQ(harness_.Fetch(kMaster, p), other_[p]);
      EXPECT_EQ(harness_.Fetch(kExpAvg, p), other_[p]);
      EXPECT_EQ(harness_.Fetch(kExpAvgSq, p), other_[p]);
    }
  }
  // Loads on all ranks without an error.
  void LoadOnAllRanks() {
    for (uint32_t rank = 0; rank < 2; ++rank) BeginAndLoad(rank);
    ASSERT_TRUE(harness_.FinishAll().status.ok());
    ExpectLoaded();
  }

  JobHarness harness_;
  const Tensors other_ = harness_.RandomTensors(77);
  std::map<std::string, std::string> before_;
  uint64_t bytes_before_ = 0;
  uint64_t request_ = 1000;
};

TEST_F(AtomicLoadTest, OthersReadTheStateOfBeforeUntilAllHaveFinished) {
  BeginAndLoad(0);
  const uint64_t first = Finish(0);
  const v1::Job job = harness_.job().Describe();
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_READY);
  EXPECT_THAT(job.open_load(), HasSubstr("rank 0 has finished"));
  EXPECT_GT(LogBytes(harness_), 0u);
  EXPECT_TRUE(FilesOf(harness_) == before_);
  BeginAndLoad(1);
  EXPECT_TRUE(FilesOf(harness_) == before_);
  EXPECT_EQ(StatusOf(0, first).code(), absl::StatusCode::kUnknown);
  const uint64_t second = Finish(1);
  EXPECT_TRUE(StatusOf(0, first).ok());
  EXPECT_TRUE(StatusOf(1, second).ok());
  ExpectLoaded();
  EXPECT_EQ(harness_.job().Describe().state_bytes(), bytes_before_);
}

TEST_F(AtomicLoadTest, ARankThatIsLostEndsItForTheOthers) {
  BeginAndLoad(0);
  BeginAndLoad(1);
  const uint64_t waits = Finish(0);
  harness_.Detach(1);
  EXPECT_EQ(StatusOf(0, waits).code(), absl::StatusCode::kAborted);
  EXPECT_THAT(StatusOf(0, waits).message(),
              AllOf(HasSubstr("rank 1 was lost"), HasSubstr("load again")));
  ExpectUnchanged();
  // A rank that still loads is told in its next call.
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  BeginAndLoad(0);
  BeginAndLoad(1);
  harness_.Detach(1);
  EXPECT_EQ(LoadPart(0).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(StatusOf(0, Finish(0)).code(), absl::StatusCode::kAborted);
  ExpectUnchanged();
  ASSERT_TRUE(harness_.Register(1).ok());
  ASSERT_TRUE(harness_.Attach(1).ok());
  LoadOnAllRanks();
}

// A trainer has an exception between two calls: nothing of the first try is in
// the second one, which leaves an array out.
TEST_F(AtomicLoadTest, ALoadThatIsBegunAnewForgetsWhatCameBefore) {
  const std::vector<float> moments = harness_.Fetch(kExpAvg, 0);
  BeginAndLoad(0);
  BeginAndLoad(1);
  ASSERT_TRUE(harness_.job().BeginLoad(0).ok());
  EXPECT_EQ(LoadPart(1).code(), absl::StatusCode::kAborted);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(harness_.job().BeginLoad(rank).ok());
    ASSERT_TRUE(harness_.LoadMaster(rank, 0, other_[0]).ok());
    if (rank == 0) continue;
    ASSERT_TRUE(harness_.FinishAll().status.ok());
  }
  EXPECT_EQ(harness_.Fetch(kMaster, 0), other_[0]);
  EXPECT_EQ(harness_.Fetch(kExpAvg, 0), moments);
}

TEST_F(AtomicLoadTest, AbortGivesALoadUp) {
  BeginAndLoad(0);
  BeginAndLoad(1);
  const uint64_t waits = Finish(0);
  ASSERT_TRUE(harness_.job().Abort(1, 2).ok());
  EXPECT_EQ(StatusOf(0, waits).code(), absl::StatusCode::kAborted);
  ExpectUnchanged();
  EXPECT_TRUE(harness_.Push(1, 2, 0, 2).ok());
  ASSERT_TRUE(harness_.job().Abort(1, 2).ok());
  LoadOnAllRanks();
}

TEST_F(AtomicLoadTest, ALoadThatDoesNotFitTheLimitLeavesTheJobAsItIs) {
  v1::Limits limits;
  limits.set_job_state_bytes_max(bytes_before_ + 600000);
  harness_.job().SetLimits(limits);
  BeginAndLoad(0);
  const uint64_t waits = Finish(0);
  ASSERT_TRUE(harness_.job().BeginLoad(1).ok());
  const absl::Status refused = LoadPart(1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(refused.message(), AllOf(HasSubstr("bytes beside the state"),
                                       HasSubstr("limits.job_state_bytes_max"),
                                       HasSubstr("The job is unchanged"),
                                       HasSubstr("optctl delete job test")));
  EXPECT_EQ(StatusOf(0, waits).code(), absl::StatusCode::kResourceExhausted);
  ExpectUnchanged();
  harness_.job().SetLimits(v1::Limits());
  LoadOnAllRanks();
}

TEST(LoadLimitTest, ALoadCountsAgainstTheLimitOfItsUser) {
  JobHarness::Setup setup;
  setup.uid = 4711;  // no operator
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 100000)};
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  v1::Limits limits;
  limits.set_user_state_bytes_max(1);  // existing jobs are not counted
  harness.job().SetLimits(limits);
  ASSERT_TRUE(harness.job().BeginLoad(0).ok());
  const absl::Status refused =
      harness.LoadMaster(0, 0, harness.RandomTensors(2)[0]);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("limits.user_state_bytes_max"));
}

TEST_F(AtomicLoadTest, ALoadThatFindsNoSpaceLeavesTheJobAsItIs) {
  for (const off_t beyond : {0, 70000, 200000}) {
    no_space_beyond = beyond;
    absl::Status refused = harness_.job().BeginLoad(0);
    ASSERT_TRUE(refused.ok());
    refused = LoadPart(0);
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    EXPECT_THAT(refused.message(), HasSubstr("No space left on device"));
    ExpectUnchanged();
    EXPECT_EQ(StatusOf(0, Finish(0)).code(),
              absl::StatusCode::kResourceExhausted);
    // A load of the job's present state still succeeds.
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(harness_.job().BeginLoad(rank).ok());
      for (uint32_t p = 0; p < 2; ++p) {
        ASSERT_TRUE(
            harness_.LoadMaster(rank, p, harness_.Fetch(kMaster, p)).ok());
      }
    }
    ASSERT_TRUE(harness_.FinishAll().status.ok());
    ExpectUnchanged();
    no_space_beyond = -1;
  }
  LoadOnAllRanks();
}

class ReplicatedLoadTest : public AtomicLoadTest {
 protected:
  ReplicatedLoadTest()
      : AtomicLoadTest([] {
          JobHarness::Setup setup = TwoRanks();
          setup.partition = PartitionMode::kReplicated;
          return setup;
        }()) {}
};

TEST_F(ReplicatedLoadTest, WhatAllRanksLoadIsKeptOnce) {
  BeginAndLoad(0);
  const uint64_t bytes = LogBytes(harness_);
  BeginAndLoad(1);
  EXPECT_EQ(LogBytes(harness_), bytes);
  ASSERT_TRUE(harness_.FinishAll().status.ok());
  ExpectLoaded();
}

}  // namespace
}  // namespace optstate::session
