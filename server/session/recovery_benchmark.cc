// Measures the time to recover after an engine died in the middle of a step:
//
//   bazel run //server/session:recovery_benchmark
//
// A process takes half of a step's runs and is killed; the time is that of
// Job::Open, which maps the files, rolls back, casts the parameters anew and
// finishes the step. For comparison it measures a whole step, and opening a job
// that died between steps.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin)
      .count();
}

class KillAtRun final : public scheduler::StepObserver {
 public:
  explicit KillAtRun(uint64_t run) : run_(run) {}
  void OnRunUpdated(uint64_t /*step*/, uint64_t /*run*/) override {
    if (--run_ == 0) ::kill(::getpid(), SIGKILL);
  }

 private:
  std::atomic<uint64_t> run_;
};

// The range is MiB of state: master, exp_avg, exp_avg_sq.
void BM_Recover(benchmark::State& state) {
  const int64_t elements = state.range(0) * (1 << 20) / 12;
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  for (int i = 0; i < 16; ++i) {
    setup.layout.parameters.push_back(
        MakeParameter("p" + std::to_string(i), elements / 16, 0,
                      DType::kBFloat16, DType::kBFloat16));
  }
  setup.workers = 2;
  setup.subgroup_elements = 0;
  setup.client_instance = 1;
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  CommitSpec spec;
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  spec.groups = groups;
  double recover_ms = 0;
  double reopen_ms = 0;
  double step_ms = 0;
  for (auto _ : state) {
    spec.step = harness.job().Describe().committed_step() + 1;
    harness.PushAll(spec.step);
    Clock::time_point begin = Clock::now();
    harness.CommitAll(spec);
    step_ms += Milliseconds(begin);
    std::vector<KeptGradients> kept;
    kept.push_back(harness.KeepGradients(0, 0));
    harness.Close();
    ++spec.step;
    const pid_t child = ::fork();
    if (child == 0) {
      KillAtRun killer(harness.layout().run_count() / 2);
      harness.setup().observer = &killer;
      if (!harness.Open().ok()) ::_exit(1);
      harness.AttachAll();
      harness.PushAll(spec.step);
      harness.CommitAll(spec);
      ::_exit(2);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    begin = Clock::now();
    if (!harness.OpenWith(std::move(kept)).ok() ||
        harness.job().Describe().committed_step() != spec.step) {
      return state.SkipWithError("the step was not finished");
    }
    recover_ms += Milliseconds(begin);
    harness.Close();
    begin = Clock::now();
    if (!harness.Open().ok()) return state.SkipWithError("not opened");
    reopen_ms += Milliseconds(begin);
    harness.AttachAll();
  }
  const auto iterations = static_cast<double>(state.iterations());
  state.counters["recover_ms"] = recover_ms / iterations;
  state.counters["reopen_ms"] = reopen_ms / iterations;
  state.counters["whole_step_ms"] = step_ms / iterations;
}
BENCHMARK(BM_Recover)
    ->Arg(16)
    ->Arg(4096)
    ->Unit(benchmark::kMillisecond)
    ->Iterations(2);

}  // namespace
}  // namespace optstate::session
