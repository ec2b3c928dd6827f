// Measures the cost of scheduling: an update through the scheduler beside the
// kernel alone on the same arrays and threads, the statistics of a push, an
// empty call of the pool; and the cost of speculation:
//   BM_Speculation   alternates updates that were wholly begun early and plain
//                    updates
//     early_cost     time of an early update, which keeps what it overwrites /
//                    that of a plain one
//     back_cost      time to roll one back / that of a plain one
//
//   bazel run //server/scheduler:step_scheduler_benchmark

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/step_scheduler.h"
#include "server/scheduler/workers/available_cores.h"

namespace optstate::scheduler {
namespace {

constexpr uint64_t kParameters = 16;

Layout MakeLayout(uint64_t elements) {
  LayoutSpec spec;
  spec.groups = {{}};
  for (uint64_t i = 0; i < kParameters; ++i) {
    ParameterSpec parameter;
    parameter.name = "p" + std::to_string(i);
    parameter.numel = static_cast<int64_t>(elements / kParameters);
    parameter.shape = {parameter.numel};
    spec.parameters.push_back(parameter);
  }
  return *Layout::Make(std::move(spec));
}

// A one-rank job of the given size, in anonymous memory, all pages touched.
struct Fixture {
  explicit Fixture(uint64_t elements)
      : layout(MakeLayout(elements)),
        partition({*MakeRankPartition(layout, PartitionMode::kGreedy, 1, 0)}),
        exp_avg(layout.flat_elements(), 0),
        exp_avg_sq(layout.flat_elements(), 0),
        parameters(layout.flat_elements(), 1),
        gradients(layout.flat_elements(), 0.5f),
        step_counts(kParameters, 0),
        run_stamps(layout.run_count()),
        pool(AvailableCores(), /*spin=*/true),
        undo(static_cast<size_t>(pool.participants())),
        speculation(StepScheduler::SpeculationBytes(layout)) {
    storage::StateArrays arrays;
    // Parameters are floats, so they are the masters too.
    arrays.parameters = reinterpret_cast<std::byte*>(parameters.data());
    arrays.state[0] = reinterpret_cast<std::byte*>(exp_avg.data());
    arrays.state[1] = reinterpret_cast<std::byte*>(exp_avg_sq.data());
    arrays.step_counts = step_counts.data();
    store = std::make_unique<storage::HostStore>(&layout, 0, arrays);
    StepScheduler::Options options;
    options.store = store.get();
    options.recovery.run_stamps = run_stamps.data();
    options.control = &control;
    options.undo = {reinterpret_cast<std::byte*>(undo.data()),
                    undo.size() * sizeof(WorkerUndo)};
    options.speculation = absl::MakeSpan(speculation);
    options.pool = &pool;
    scheduler = *StepScheduler::Create(options);
    scheduler->SetPartitions(partition, /*replicated=*/false);
  }
  const std::byte* gradient_area() const {
    return reinterpret_cast<const std::byte*>(gradients.data());
  }

  const Layout layout;
  const std::vector<RankPartition> partition;
  std::vector<float> exp_avg, exp_avg_sq, parameters, gradients;
  std::vector<int64_t> step_counts;
  std::vector<std::atomic<uint64_t>> run_stamps;
  storage::ControlFile control = {};
  WorkerPool pool;
  std::vector<WorkerUndo> undo;
  std::vector<std::byte> speculation;
  std::unique_ptr<storage::HostStore> store;
  std::unique_ptr<StepScheduler> scheduler;
};

void CountElements(benchmark::State& state) {
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

// Runs updates of all parameters, step after step.
class Steps {
 public:
  explicit Steps(Fixture* fixture) : fixture_(*fixture) {
    update_.groups = absl::MakeConstSpan(&group_, 1);
    update_.updated = updated_;
    update_.gradient_areas = absl::MakeConstSpan(&area_, 1);
  }

  void Begin() {
    ++update_.step;
    fixture_.control.counts_begun = 0;
  }
  // The host's store never fails.
  void Apply() { (void)fixture_.scheduler->Apply(update_); }
  void Speculate() { (void)fixture_.scheduler->Speculate(update_); }
  void RollBack() {
    (void)fixture_.scheduler->RollBackSpeculation(update_.step);
  }

 private:
  Fixture& fixture_;
  const StepScheduler::GroupUpdate group_ = {AdamHyperparams(), 1};
  const std::vector<uint8_t> updated_ = std::vector<uint8_t>(kParameters, 1);
  const std::byte* const area_ = fixture_.gradient_area();
  StepScheduler::Update update_;
};

void BM_Scheduler(benchmark::State& state) {
  Fixture fixture(static_cast<uint64_t>(state.range(0)));
  Steps steps(&fixture);
  for (auto _ : state) {
    steps.Begin();
    steps.Apply();
  }
  CountElements(state);
}

template <typename F>
double SecondsOf(const F& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

double Median(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void BM_Speculation(benchmark::State& state) {
  Fixture fixture(static_cast<uint64_t>(state.range(0)));
  Steps steps(&fixture);
  std::vector<double> early, back;
  for (auto _ : state) {
    steps.Begin();
    const double plain = SecondsOf([&] { steps.Apply(); });
    steps.Begin();
    steps.Speculate();
    back.push_back(SecondsOf([&] { steps.RollBack(); }) / plain);
    early.push_back(SecondsOf([&] { steps.Speculate(); }) / plain);
    steps.Apply();  // finds the update done
  }
  state.counters["early_cost"] = Median(std::move(early));
  state.counters["back_cost"] = Median(std::move(back));
}

void BM_KernelAlone(benchmark::State& state) {
  Fixture fixture(static_cast<uint64_t>(state.range(0)));
  const kernels::UpdateKernel* kernel = *kernels::FindUpdateKernel({});
  const kernels::UpdateFactors factors =
      kernel->prepare({.hyperparams = AdamHyperparams()});
  const uint64_t elements = fixture.layout.flat_elements();
  const uint64_t chunk = std::min(elements, kSubGroupElementsDefault);
  for (auto _ : state) {
    fixture.pool.ParallelFor(elements / chunk, [&](size_t i) {
      kernels::TileView view;
      const void* const gradient = fixture.gradients.data() + i * chunk;
      view.gradients = absl::MakeConstSpan(&gradient, 1);
      view.master = view.parameter = fixture.parameters.data() + i * chunk;
      view.state[0] = fixture.exp_avg.data() + i * chunk;
      view.state[1] = fixture.exp_avg_sq.data() + i * chunk;
      view.numel = chunk;
      kernel->apply(factors, view);
    });
  }
  CountElements(state);
}

void BM_Stage(benchmark::State& state) {
  Fixture fixture(static_cast<uint64_t>(state.range(0)));
  const std::vector<StageAction> actions(kParameters, StageAction::kStage);
  const std::byte* area = fixture.gradient_area();
  for (auto _ : state) {
    fixture.scheduler->Stage(
        {.gradient_areas = absl::MakeConstSpan(&area, 1), .actions = actions});
  }
  CountElements(state);
}

void BM_EmptyParallelFor(benchmark::State& state) {
  WorkerPool pool(AvailableCores(), /*spin=*/true);
  for (auto _ : state) {
    pool.ParallelFor(static_cast<size_t>(state.range(0)),
                     [](size_t i) { benchmark::DoNotOptimize(i); });
  }
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  for (const int64_t elements : {1 << 16, 1 << 20, 1 << 24}) {
    benchmark->Arg(elements);
  }
  benchmark->UseRealTime();
}

BENCHMARK(BM_KernelAlone)->Apply(Sizes);
BENCHMARK(BM_Scheduler)->Apply(Sizes);
BENCHMARK(BM_Speculation)->Apply(Sizes);
BENCHMARK(BM_Stage)->Apply(Sizes);
BENCHMARK(BM_EmptyParallelFor)->Arg(1)->Arg(2)->Arg(64)->UseRealTime();

}  // namespace
}  // namespace optstate::scheduler
