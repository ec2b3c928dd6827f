// Measures what speculation saves: the time from the last push of a step to the
// answer of its commit, of a job that is speculated with (speculative 1) and
// one that is not (0):
//
//   bazel run //server/session:speculation_benchmark
//
// A backward pass of the given length pushes 16 Mi elements, in so many
// parameters of equal size, one by one, while the host's cores have nothing
// else to do, as with a trainer on a GPU. commits: 0, all are equal and nothing
// is clipped; 1, every step is clipped; 2, every other step is clipped; 3,
// every third commit has another learning rate.
//   exposed_ms   the time from the last push to the answer, on average
//   ahead_ms     the time spent on updates before the commit, on average

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "benchmark/benchmark.h"
#include "server/session/steps/foreseen_commit.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kElements = 16 << 20;

enum class Commits : uint8_t {
  kEqual,
  kAllClipped,
  kEveryOtherClipped,
  kRatesChange,
};

JobHarness::Setup SetupOf(uint32_t ranks, bool speculative,
                          uint32_t parameters) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  for (uint32_t i = 0; i < parameters; ++i) {
    setup.layout.parameters.push_back(
        MakeParameter("p" + std::to_string(i), kElements / parameters));
  }
  setup.world_size = ranks;
  setup.speculative = speculative;
  setup.subgroup_elements = 0;
  return setup;
}

// Takes steps as ranks with a backward pass do. The time counts from when the
// last push is due, so that work which delays it counts.
class Trainer {
 public:
  Trainer(JobHarness* harness, Clock::duration backward)
      : harness_(*harness), interval_(backward / ParameterCount()) {}

  double Step(const CommitSpec& spec) {
    Clock::time_point due = Clock::now();
    for (uint32_t p = 0; p < ParameterCount(); ++p) {
      due += interval_;
      Idle(due);
      for (uint32_t rank = 0; rank < harness_.SpecOf(0).world_size; ++rank) {
        (void)harness_.Push(rank, spec.step, p, 1);  // its part, if any
      }
    }
    harness_.CommitAll(spec);
    return std::chrono::duration<double, std::milli>(Clock::now() - due)
        .count();
  }

  Clock::duration ahead() const { return ahead_; }

 private:
  uint32_t ParameterCount() const {
    return static_cast<uint32_t>(harness_.layout().parameters().size());
  }
  // Has the engine do what it does when its ranks ask for nothing.
  void Idle(Clock::time_point end) {
    while (true) {
      const Clock::time_point begin = Clock::now();
      if (begin >= end) return;
      const bool is_more = harness_.job().WorkAhead(0);
      ahead_ += Clock::now() - begin;
      if (!is_more) std::this_thread::sleep_until(end);
    }
  }

  JobHarness& harness_;
  const Clock::duration interval_;
  Clock::duration ahead_{};
};

CommitSpec CommitOf(uint64_t step, Commits commits,
                    std::vector<Hyperparams>* groups) {
  CommitSpec spec;
  spec.step = step;
  if (commits == Commits::kRatesChange) {
    (*groups)[0].value[0] = 1e-3 / static_cast<double>(1 + step / 3);
  }
  spec.groups = *groups;
  spec.max_norm = commits == Commits::kEqual ? 0 : 1e6;
  return spec;
}

void BM_Backward(benchmark::State& state) {
  const bool speculative = state.range(0) != 0;
  const auto commits = static_cast<Commits>(state.range(3));
  JobHarness harness(SetupOf(static_cast<uint32_t>(state.range(1)), speculative,
                             static_cast<uint32_t>(state.range(4))));
  const Tensors values = harness.RandomTensors(1);
  harness.Start(values);
  harness.SetGradients(values);
  std::vector<float> large = values[0];
  large[0] = 1e8;  // alone more than the largest norm
  if (commits == Commits::kAllClipped) harness.SetGradient(0, large);
  Trainer trainer(&harness, std::chrono::milliseconds(state.range(2)));
  std::vector<Hyperparams> groups(1, AdamHyperparams());
  uint64_t step = 0;
  const auto take_step = [&] {
    ++step;
    if (commits == Commits::kEveryOtherClipped) {
      harness.SetGradient(0, step % 2 == 0 ? large : values[0]);
    }
    return trainer.Step(CommitOf(step, commits, &groups));
  };
  while (step < ForeseenCommit::kSteps) {  // also touches all pages
    take_step();
  }
  double exposed_ms = 0;
  const Clock::duration ahead_before = trainer.ahead();
  for (auto _ : state) {
    exposed_ms += take_step();
  }
  const auto steps = static_cast<double>(state.iterations());
  const std::chrono::duration<double, std::milli> ahead =
      trainer.ahead() - ahead_before;
  state.counters["exposed_ms"] = exposed_ms / steps;
  state.counters["ahead_ms"] = ahead.count() / steps;
}

void Cases(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames(
      {"speculative", "ranks", "backward_ms", "commits", "parameters"});
  for (const int64_t backward_ms : {50, 200, 800}) {
    for (const int64_t ranks : {1, 2}) {
      for (const int64_t commits : {0, 1, 2, 3}) {
        for (const int64_t speculative : {0, 1}) {
          benchmark->Args({speculative, ranks, backward_ms, commits, 16});
        }
      }
    }
  }
  for (const int64_t parameters : {1000, 10000}) {
    for (const int64_t speculative : {0, 1}) {
      benchmark->Args({speculative, 1, 800, 0, parameters});
    }
  }
  benchmark->Iterations(12)->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(BM_Backward)->Apply(Cases);

}  // namespace
}  // namespace optstate::session
