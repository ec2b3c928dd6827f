// Measures the cost per element of a step through the daemon, with more
// parameters or more jobs: it should not change. Gradients are copied in from
// memory of the trainer's own and parameters back into it, as the Python client
// does, but by the client library alone.
//
//   Parameters/number   16 million float32 elements in so many parameters
//   Jobs/number         16 Mi in so many jobs, a thread each, which take some
//                       steps side by side; jobs do not wait for each other
// Each takes turns with the smallest of its kind.
//     cost   time of an element / that of the smallest

#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "client/client.h"
#include "tests/benchmarks/benchmark_daemon.h"
#include "tests/benchmarks/median.h"
#include "tests/conformance/step_script.h"

namespace optstate {
namespace {

using Clock = std::chrono::steady_clock;
using client::Session;

constexpr int64_t kMi = 1 << 20;
// The number of elements is one that 100,000 parameters share evenly.
constexpr int64_t kElements = 16'000'000;
constexpr int64_t kFewestParameters = 10;
constexpr size_t kParametersOfAJob = 4;
// The number of steps of each job, so that the last one's end does not count
// for much.
constexpr int kStepsOfATurn = 8;

// A trainer of float32 parameters that lie in one array, as their gradients do.
class Trainer {
 public:
  Trainer(size_t parameters, int64_t numel)
      : gradients_(parameters * static_cast<size_t>(numel), 0.01f),
        values_(gradients_.size()),
        indices_(parameters) {
    std::iota(indices_.begin(), indices_.end(), 0u);
    for (size_t i = 0; i < parameters; ++i) {
      const size_t at = i * static_cast<size_t>(numel);
      sources_.push_back(gradients_.data() + at);
      targets_.push_back(values_.data() + at);
    }
    client::SessionOptions options = NewJob(UniformLayout(parameters, numel));
    options.endpoint = Daemon().shm_endpoint();
    options.ephemeral = true;
    auto session = Session::Open(std::move(options));
    Require(session.status());
    session_ = *std::move(session);
    Require(LoadConstant(*session_, 1));
    commit_ = CommitOf(*session_, 1);
  }

  void Step() {
    Require(session_->PushGradients(commit_.step, 0, indices_, sources_));
    Require(session_->Commit(commit_, {indices_, targets_}).status());
    ++commit_.step;
  }

 private:
  static void Require(const absl::Status& status) {
    if (status.ok()) return;
    std::cerr << status << std::endl;
    std::exit(1);
  }

  const std::vector<float> gradients_;
  std::vector<float> values_;
  std::vector<uint32_t> indices_;
  std::vector<const void*> sources_;
  std::vector<void*> targets_;
  std::unique_ptr<Session> session_;
  client::CommitOptions commit_;
};

// Jobs that step side by side, each from a thread of its own.
class Jobs {
 public:
  explicit Jobs(size_t number) : turn_(static_cast<ptrdiff_t>(number) + 1) {
    const int64_t numel =
        16 * kMi / static_cast<int64_t>(number * kParametersOfAJob);
    for (size_t i = 0; i < number; ++i) {
      trainers_.push_back(std::make_unique<Trainer>(kParametersOfAJob, numel));
    }
    for (const auto& trainer : trainers_) {
      threads_.emplace_back([this, raw = trainer.get()] {
        while (true) {
          turn_.arrive_and_wait();
          if (over_) return;
          for (int i = 0; i < kStepsOfATurn; ++i) raw->Step();
          turn_.arrive_and_wait();
        }
      });
    }
  }
  ~Jobs() {
    over_ = true;
    turn_.arrive_and_wait();
  }

  void Step() {
    turn_.arrive_and_wait();
    turn_.arrive_and_wait();
  }

 private:
  std::barrier<> turn_;
  bool over_ = false;  // read after a turn
  std::vector<std::unique_ptr<Trainer>> trainers_;
  std::vector<std::jthread> threads_;
};

template <typename T>
double SecondsOf(T& stepping) {
  const auto begin = Clock::now();
  stepping.Step();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

template <typename T>
void Compare(benchmark::State& state, T& few, T& many) {
  for (int warm = 0; warm < 2; ++warm) {  // pages, and the daemon's threads
    few.Step();
    many.Step();
  }
  std::vector<double> cost;
  for (auto _ : state) {
    const double base = SecondsOf(few);
    const double seconds = SecondsOf(many);
    state.SetIterationTime(seconds);
    cost.push_back(seconds / base);
  }
  state.counters["cost"] = Median(std::move(cost));
}

void BM_Parameters(benchmark::State& state) {
  const int64_t number = state.range(0);
  Trainer few(kFewestParameters, kElements / kFewestParameters);
  Trainer many(static_cast<size_t>(number), kElements / number);
  Compare(state, few, many);
}

void BM_Jobs(benchmark::State& state) {
  Jobs one(1);
  Jobs many(static_cast<size_t>(state.range(0)));
  Compare(state, one, many);
}

BENCHMARK(BM_Parameters)
    ->RangeMultiplier(10)
    ->Range(10, 100'000)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Jobs)->RangeMultiplier(2)->Range(1, 32)->UseManualTime()->Unit(
    benchmark::kMillisecond);

}  // namespace
}  // namespace optstate
