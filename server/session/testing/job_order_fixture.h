#ifndef OPTSTATE_SERVER_SESSION_TESTING_JOB_ORDER_FIXTURE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_JOB_ORDER_FIXTURE_H_

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

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/observe/peer_log.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_harness.h"

// A fixture that interrupts a step after each store to the job's files, in
// turn.
//
// A child takes the step, one instruction at a time (ptrace). After each
// instruction that has changed a file, the files are what a SIGKILL at this
// point would have left: a copy of them is opened and the step finished there.

namespace optstate::session {

// The files of a folder, mapped so that looking costs no system call.
class MappedFolder {
 public:
  explicit MappedFolder(const std::string& path) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
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
    std::filesystem::remove_all(path);
    std::filesystem::create_directory(path);
    for (const auto& [name, file] : files_) {
      std::ofstream(std::filesystem::path(path) / name, std::ios::binary)
          << file.seen;
    }
  }

 private:
  struct File {
    const char* now = nullptr;
    std::string seen;
  };
  std::map<std::string, File> files_;
};

struct OrderCase {
  const char* name;
  bool accumulate;
  OptimizerKind optimizer;
  StateFormat state_format;
  bool reduced = false;  // two ranks, by the engine
  AccumulateDType sums = AccumulateDType::kFloat32;
  MasterFormat master_format = MasterFormat::kFloat32;
  bool speculative = false;  // two ranks, each with its parameters
};

inline JobHarness::Setup SmallSetup(const OrderCase& test) {
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

class JobOrderTest : public ::testing::TestWithParam<OrderCase> {
 protected:
  JobOrderTest()
      : harness_(SmallSetup(GetParam())), copy_(SmallSetup(GetParam())) {
    JobHarness undisturbed(SmallSetup(GetParam()));
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

  // absl::Now() does not return when it is stepped.
  observe::LineLimiter lines_{[] { return absl::UnixEpoch(); }};
  const observe::ScopedRepeatedLines scope_{&lines_};
  const std::vector<Hyperparams> groups_ =
      std::vector<Hyperparams>(2, DefaultHyperparams(GetParam().optimizer));
  JobHarness harness_;
  JobHarness copy_;
  std::string expected_;
  bool attach_all_ = true;  // StepThrough's child, before all else
};

inline constexpr OrderCase kReduced = {"Reduced", false, OptimizerKind::kAdamW,
                                       StateFormat::kFloat32, true};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_JOB_ORDER_FIXTURE_H_
