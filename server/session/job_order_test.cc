// A step is interrupted after each store to the job's files, in turn, and must
// be finished from there to the same bits.
//
// A child takes the step, one instruction at a time (ptrace). After each
// instruction that has changed a file, the files are what a SIGKILL at this
// point would have left: a copy of them is opened and the step finished there.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/job_harness.h"

namespace optstate {
namespace {

namespace fs = std::filesystem;

// The files of a folder, mapped so that looking costs no system call.
class MappedFolder {
 public:
  explicit MappedFolder(const std::string& path) {
    for (const auto& entry : fs::directory_iterator(path)) {
      const size_t bytes = entry.file_size();
      const int fd = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
      void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
      ::close(fd);
      EXPECT_NE(data, MAP_FAILED);
      files_[entry.path().filename()] = {static_cast<const char*>(data),
                                         std::string(bytes, '\0')};
    }
    Changed();
  }
  ~MappedFolder() {
    for (const auto& [name, file] : files_) {
      ::munmap(const_cast<char*>(file.now), file.seen.size());
    }
  }

  // Returns whether a file has changed since the last look.
  bool Changed() {
    bool changed = false;
    for (auto& [name, file] : files_) {
      if (std::memcmp(file.now, file.seen.data(), file.seen.size()) == 0) {
        continue;
      }
      changed = true;
      std::memcpy(file.seen.data(), file.now, file.seen.size());
    }
    return changed;
  }

  // Copies the files as last seen into another folder.
  void CopyTo(const std::string& path) const {
    fs::remove_all(path);
    fs::create_directory(path);
    for (const auto& [name, file] : files_) {
      std::ofstream(fs::path(path) / name, std::ios::binary) << file.seen;
    }
  }

 private:
  struct File {
    const char* now = nullptr;
    std::string seen;
  };
  std::map<std::string, File> files_;
};

struct Case {
  const char* name;
  bool accumulate;
  OptimizerKind optimizer;
  StateFormat state_format;
  bool reduced = false;  // two ranks, by the engine
  AccumulateDType sums = AccumulateDType::kFloat32;
  MasterFormat master_format = MasterFormat::kFloat32;
  bool speculative = false;  // two ranks, each with its parameters
};

JobHarness::Setup Small(const Case& test) {
  JobHarness::Setup setup;
  setup.layout.optimizer = test.optimizer;
  setup.layout.state_format = test.state_format;
  setup.layout.master_format = test.master_format;
  const size_t options = InfoOf(test.optimizer).options.size();
  setup.layout.groups = {{}, {.options = (1u << options) - 1}};
  setup.layout.parameters = {
      MakeParameter("a", 37), MakeParameter("idle", 5),
      MakeParameter("none", 0),
      MakeParameter("b", 50, 1, DType::kBFloat16, DType::kBFloat16),
      MakeParameter("c", 3, 1, DType::kFloat32, DType::kBFloat16)};
  if (test.optimizer == OptimizerKind::kMuon) {  // it takes matrices
    for (ParameterSpec& parameter : setup.layout.parameters) {
      parameter.shape.push_back(1);
    }
  }
  if (test.reduced) {
    setup.world_size = 2;
    setup.partition = PartitionMode::kReplicated;
  }
  if (test.speculative) {
    setup.world_size = 2;
    setup.speculative = true;
  }
  setup.accumulate = test.accumulate;
  setup.accumulate_dtype = test.sums;
  setup.client_instance = 40;
  setup.workers = 1;  // single-stepping follows one thread
  return setup;
}

class JobOrderTest : public ::testing::TestWithParam<Case> {
 protected:
  JobOrderTest() : harness_(Small(GetParam())), copy_(Small(GetParam())) {
    JobHarness undisturbed(Small(GetParam()));
    TakeTwoSteps(&undisturbed);
    PushAndCommit(&undisturbed);
    expected_ = undisturbed.StateBytes();
    TakeTwoSteps(&harness_);
    harness_.Close();
    copy_.Start(copy_.RandomTensors(1));  // knows the sizes of gradients
    copy_.Close();
  }

  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    if (step == 3) spec.max_norm = 0.5;
    return spec;
  }
  void TakeTwoSteps(JobHarness* harness) {
    harness->Start(harness->RandomTensors(1));
    for (uint64_t step = 1; step <= 2; ++step) {
      harness->Step(step, harness->RandomTensors(step), CommitOf(step));
    }
  }
  void PushMicroStep(JobHarness* harness, uint32_t micro_step) {
    harness->SetGradients(harness->RandomTensors(3 + micro_step));
    harness->PushAll(3, micro_step, {1});
  }
  void Push(JobHarness* harness) {
    PushMicroStep(harness, 0);
    if (GetParam().accumulate) PushMicroStep(harness, 1);
  }
  void PushAndCommit(JobHarness* harness) {
    Push(harness);
    harness->CommitAll(CommitOf(3));
  }

  // Runs `before`, and then `stepped`, in a child; `check` is called for each
  // state of the files in between, until `over`: absl::Now() does not return
  // when it is stepped, for it measures its own duration. Returns the number of
  // states; -1: the machine forbids tracing.
  int StepThrough(
      const std::function<void()>& before, const std::function<void()>& stepped,
      const std::function<void()>& check,
      const std::function<bool()>& over = [] { return false; }) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(77);
      if (!harness_.Open().ok()) ::_exit(1);
      if (attach_all_) harness_.AttachAll();
      before();
      ::raise(SIGSTOP);
      stepped();
      ::raise(SIGSTOP);
      ::_exit(0);
    }
    int status = 0;
    if (::waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return -1;
    MappedFolder files(harness_.directory() + "/state");
    int states = 0;
    while (!HasFailure()) {
      if (::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0 ||
          ::waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) {
        ADD_FAILURE() << "the child does not step, status " << status;
        break;
      }
      if (WSTOPSIG(status) == SIGSTOP) break;
      if (!files.Changed()) continue;
      ++states;
      files.CopyTo(copy_.directory() + "/state");
      check();
      copy_.Close();
      if (over()) break;
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
    return states;
  }

  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(2, DefaultHyperparams(GetParam().optimizer));
  JobHarness harness_;
  JobHarness copy_;
  std::string expected_;
  bool attach_all_ = true;  // StepThrough's child, before all else
};

TEST_P(JobOrderTest, AStepIsFinishedFromEveryStore) {
  int finished = 0;
  const int states = StepThrough(
      [&] { Push(&harness_); }, [&] { harness_.CommitAll(CommitOf(3)); },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        copy_.SetGradients(copy_.RandomTensors(3));
        copy_.AttachAll();
        if (copy_.job().Describe().committed_step() == 2) {
          // Sums exist, except for parameters without elements.
          if (GetParam().accumulate) {
            PushMicroStep(&copy_, 1);
          } else {
            Push(&copy_);
          }
          copy_.CommitAll(CommitOf(3));
        } else {
          ++finished;
        }
        EXPECT_TRUE(copy_.StateBytes() == expected_);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  RecordProperty("states", states);
  // The stores are vectors of three parameters, their counts, and the progress.
  EXPECT_GT(states, 50);
  EXPECT_GT(finished, 40);
}

// Loads all state and is interrupted from the last rank's finish on.
TEST_P(JobOrderTest, ALoadIsWholeOrNotAtAllFromEveryStore) {
  if (GetParam().accumulate || GetParam().reduced || GetParam().speculative) {
    GTEST_SKIP() << "the same";
  }
  const auto load = [](JobHarness* harness) {
    const Tensors values = harness->RandomTensors(77);
    ASSERT_TRUE(harness->job().BeginLoad(0).ok());
    for (uint32_t p = 0; p < values.size(); ++p) {
      ASSERT_TRUE(harness->LoadMaster(0, p, values[p]).ok());
      if (!harness->layout().has_state_array(
              0, harness->layout().parameters()[p].group)) {
        continue;
      }
      ASSERT_TRUE(
          harness->LoadArray(0, v1::STATE_ARRAY_STATE_0, p, values[p]).ok());
    }
    const int64_t count = 9;
    ASSERT_TRUE(harness->job()
                    .Load(0, v1::STATE_ARRAY_STEP_COUNT, 3, 0, 1,
                          DType::kFloat32,
                          absl::MakeConstSpan(
                              reinterpret_cast<const std::byte*>(&count), 8))
                    .ok());
  };
  JobHarness before(Small(GetParam()));
  TakeTwoSteps(&before);
  const std::string old_state = before.StateBytes();
  JobHarness after(Small(GetParam()));
  TakeTwoSteps(&after);
  load(&after);
  ASSERT_TRUE(after.FinishAll().status.ok());
  const std::string new_state = after.StateBytes();
  size_t old_seen = 0, new_seen = 0;
  const int states = StepThrough(
      [&] { load(&harness_); }, [&] { harness_.FinishAll(); },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        ASSERT_EQ(copy_.job().Describe().phase(), v1::JOB_PHASE_READY);
        const std::string state = copy_.StateBytes();
        (state == new_state ? new_seen : old_seen) += 1;
        EXPECT_TRUE(state == new_state || state == old_state);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GT(old_seen, 0u);
  EXPECT_GT(new_seen, 10u);
}

TEST_P(JobOrderTest, AMicroStepIsFinishedFromEveryStore) {
  if (!GetParam().accumulate) GTEST_SKIP() << "only with accumulation";
  const int states = StepThrough([&] { PushMicroStep(&harness_, 0); },
                                 [&] { PushMicroStep(&harness_, 1); },
                                 [&] {
                                   ASSERT_TRUE(copy_.Open().ok());
                                   copy_.AttachAll();
                                   PushMicroStep(&copy_, 1);
                                   copy_.CommitAll(CommitOf(3));
                                   EXPECT_TRUE(copy_.StateBytes() == expected_);
                                 });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  RecordProperty("states", states);
  EXPECT_GT(states, 20);
}

// The update has begun with the sums of a rank that has committed when the
// other one is killed in the middle of its own.
TEST_P(JobOrderTest, AMicroStepBehindSpeculationIsAddedOnce) {
  if (!GetParam().speculative || !GetParam().accumulate) GTEST_SKIP();
  const auto push_last = [](JobHarness* harness, uint32_t rank) {
    ASSERT_TRUE(harness->Push(rank, 3, 0, 1, 1).ok());
    ASSERT_TRUE(harness->Push(rank, 3, 2, 3, 1).ok());
  };
  const int states = StepThrough(
      [&] {
        PushMicroStep(&harness_, 0);
        harness_.SetGradients(harness_.RandomTensors(4));
        push_last(&harness_, 0);
        harness_.Commit(0, CommitOf(3));
      },
      [&] { push_last(&harness_, 1); },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        copy_.AttachAll();
        PushMicroStep(&copy_, 1);
        copy_.CommitAll(CommitOf(3));
        EXPECT_TRUE(copy_.StateBytes() == expected_);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GT(states, 10);
}

constexpr Case kReduced = {"Reduced", false, OptimizerKind::kAdamW,
                           StateFormat::kFloat32, true};

class DiesInStep final : public StepObserver {
 public:
  void OnStepMarked(uint64_t) override { ::kill(::getpid(), SIGKILL); }
};

// A fixture with two ranks, of which one comes or goes.
class RankOrderTest : public JobOrderTest {
 protected:
  static constexpr uint32_t kRank = 1;
  static constexpr RankProcess kFirst = {.pid = 1001, .start_ticks = 5001};
  static constexpr RankProcess kSecond = {.pid = 1002, .start_ticks = 5002};

  void BringBack(uint32_t rank) {
    ASSERT_TRUE(copy_.Register(rank).ok());
    ASSERT_TRUE(copy_.Attach(rank).ok());
    copy_.SetGradients(copy_.RandomTensors(3));
  }
  void PushAndCommitOf(uint32_t rank) {
    ASSERT_TRUE(copy_.Push(rank, 3, 0, 1).ok());
    ASSERT_TRUE(copy_.Push(rank, 3, 2, 3).ok());
    copy_.Commit(rank, CommitOf(3));
  }
  void DieInStep3() {
    const pid_t child = ::fork();
    if (child == 0) {
      DiesInStep observer;
      harness_.setup().observer = &observer;
      if (!harness_.Open().ok()) ::_exit(1);
      harness_.AttachAll();
      PushAndCommit(&harness_);
      ::_exit(2);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
  }
  // Gives up a rank as the process does that watches for ranks that do not
  // return.
  void GiveUp(uint32_t rank) {
    for (const FormerRank& former : copy_.job().Awaited()) {
      if (former.rank == rank) copy_.job().GiveUp(former);
    }
  }
};

// The failure comes in a step that is to be finished: no rank waits for
// gradients that no rank has.
TEST_P(RankOrderTest, AFailureIsWholeOrNotAtAllFromEveryStore) {
  DieInStep3();
  attach_all_ = false;
  size_t failed = 0;
  const int states = StepThrough(
      [&] {
        if (!harness_.Register(0).ok()) ::_exit(2);
        if (!harness_.Attach(0).ok()) ::_exit(3);
      },
      [&] {
        harness_.job().GiveUp({.rank = kRank, .client_instance = 40 + kRank});
      },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        if (copy_.job().Describe().phase() == v1::JOB_PHASE_FAILED) {
          ++failed;
          return;
        }
        EXPECT_EQ(copy_.job().Describe().phase(), v1::JOB_PHASE_RECOVERING);
        EXPECT_EQ(copy_.job().Awaited().size(), 2u);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GE(failed, 3u);  // not attached, for which rank, given up
  EXPECT_GT(states, static_cast<int>(failed));
}

// The other rank waits for the lost one.
TEST_P(RankOrderTest, ALossIsToldFromEveryStore) {
  const int states = StepThrough(
      [&] {
        Push(&harness_);
        harness_.Commit(0, CommitOf(3));
      },
      [&] { harness_.Detach(kRank); },
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        GiveUp(kRank);
        BringBack(0);
        const size_t told = copy_.NoticesTo(0).size();
        PushAndCommitOf(0);
        ASSERT_EQ(copy_.NoticesTo(0).size(), told + 1);
        EXPECT_EQ(copy_.NoticesTo(0).back(),
                  "rank 1 lost at step 3, waiting for its return");
        BringBack(kRank);
        PushAndCommitOf(kRank);
        EXPECT_TRUE(copy_.StateBytes() == expected_);
      });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GE(states, 3);
}

// Another session attaches in a rank's place. A process is never taken for
// another one.
TEST_P(RankOrderTest, AnAttachIsWholeOrNotAtAllFromEveryStore) {
  const auto come = [&](uint64_t instance, const RankProcess& process) {
    harness_.Detach(kRank);
    if (!harness_.Register(kRank).ok()) ::_exit(2);
    harness_.setup().client_instance = instance;
    harness_.setup().processes = {{}, process};
  };
  const auto attach = [&] {
    if (!harness_.Attach(kRank).ok()) ::_exit(3);
  };
  size_t away = 0;
  size_t known = 0;
  const int states = StepThrough(
      [&] {
        come(50, kFirst);
        attach();
        come(60, kSecond);
      },
      attach,
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        const std::vector<FormerRank> awaited = copy_.job().Awaited();
        ASSERT_FALSE(awaited.empty());
        EXPECT_EQ(awaited[0].rank, 0u);
        if (awaited.size() == 1) {
          ++away;
          return;
        }
        EXPECT_EQ(awaited[1].rank, kRank);
        EXPECT_EQ(awaited[1].client_instance, 60 + kRank);
        ++known;
        EXPECT_EQ(awaited[1].process.pid, kSecond.pid);
        EXPECT_EQ(awaited[1].process.start_ticks, kSecond.start_ticks);
      },
      [&] { return known > 0; });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_GT(away, 2u);
}

// A session that returns after its engine died is awaited throughout.
TEST_P(RankOrderTest, WhoIsBackStaysAttachedFromEveryStore) {
  const auto open_again = [&](const RankProcess& process) {
    harness_.setup().processes = {{}, process};
    harness_.Close();
    if (!harness_.Open().ok()) ::_exit(2);
    if (!harness_.Register(kRank).ok()) ::_exit(3);
  };
  const auto attach = [&] {
    if (!harness_.Attach(kRank).ok()) ::_exit(4);
  };
  std::set<pid_t> seen;
  const int states = StepThrough(
      [&] {
        open_again(kFirst);
        attach();
        open_again(kSecond);
      },
      attach,
      [&] {
        ASSERT_TRUE(copy_.Open().ok());
        const std::vector<FormerRank> awaited = copy_.job().Awaited();
        ASSERT_EQ(awaited.size(), 2u);
        EXPECT_EQ(awaited[1].client_instance, 40 + kRank);
        const RankProcess& process = awaited[1].process;
        seen.insert(process.pid);
        if (process.pid == kFirst.pid) {
          EXPECT_EQ(process.start_ticks, kFirst.start_ticks);
        } else if (process.pid == kSecond.pid) {
          EXPECT_EQ(process.start_ticks, kSecond.start_ticks);
        }
      },
      [&] { return seen.contains(kSecond.pid); });
  if (states < 0) GTEST_SKIP() << "this machine does not let us trace a child";
  EXPECT_TRUE(seen.contains(0)) << "nobody's, in between";
}

INSTANTIATE_TEST_SUITE_P(Ranks, RankOrderTest, ::testing::Values(kReduced),
                         [](const auto& param_info) {
                           return param_info.param.name;
                         });

constexpr Case kCases[] = {
    {"Plain", false, OptimizerKind::kAdamW, StateFormat::kFloat32},
    {"Accumulating", true, OptimizerKind::kAdamW, StateFormat::kFloat32},
    {"BFloat16State", false, OptimizerKind::kAdamW, StateFormat::kBFloat16},
    {"Dynamic8State", false, OptimizerKind::kRmsprop, StateFormat::kDynamic8},
    {"Scalars", false, OptimizerKind::kNadam, StateFormat::kFloat32},
    {"Whole", false, OptimizerKind::kLamb, StateFormat::kFloat32},
    kReduced,
    {"WholeReduced", false, OptimizerKind::kLamb, StateFormat::kFloat32, true},
    {"ReducedAccumulating", true, OptimizerKind::kAdamW, StateFormat::kFloat32,
     true},
    {"AccumulatingInGradientDType", true, OptimizerKind::kAdamW,
     StateFormat::kFloat32, true, AccumulateDType::kGradient},
    {"WholeAccumulating", true, OptimizerKind::kAdafactor,
     StateFormat::kFloat32},
    {"WholeBFloat16State", false, OptimizerKind::kLamb, StateFormat::kBFloat16},
    {"WholeDynamic8State", true, OptimizerKind::kAdafactor,
     StateFormat::kDynamic8},
    {"WholeSplitMasterBFloat16State", false, OptimizerKind::kMuon,
     StateFormat::kBFloat16, false, AccumulateDType::kFloat32,
     MasterFormat::kSplit},
    {"WholeSplitMasterDynamic8State", false, OptimizerKind::kLamb,
     StateFormat::kDynamic8, true, AccumulateDType::kFloat32,
     MasterFormat::kSplit},
    {"SplitMaster", false, OptimizerKind::kAdamW, StateFormat::kFloat32, false,
     AccumulateDType::kFloat32, MasterFormat::kSplit},
    {"Speculating", false, OptimizerKind::kAdamW, StateFormat::kFloat32, false,
     AccumulateDType::kFloat32, MasterFormat::kSplit, true},
    {"SpeculatingAccumulating", true, OptimizerKind::kAdamW,
     StateFormat::kFloat32, false, AccumulateDType::kFloat32,
     MasterFormat::kFloat32, true},
    {"SplitMasterDynamic8State", false, OptimizerKind::kLion,
     StateFormat::kDynamic8, false, AccumulateDType::kFloat32,
     MasterFormat::kSplit},
};

INSTANTIATE_TEST_SUITE_P(All, JobOrderTest, ::testing::ValuesIn(kCases),
                         [](const auto& param_info) {
                           return param_info.param.name;
                         });

}  // namespace
}  // namespace optstate
