// Measures the engine's time for a load of a whole state:
//
//   bazel run //server/session:load_benchmark
//
// In a new job a load is written in place; in a job with a state it is staged
// beside the state and then installed; a load of the state itself is only
// compared. Loaded are masters, exp_avg and exp_avg_sq of AdamW for float32
// parameters, in the pieces that a rank with shared memory sends.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

constexpr int kParameters = 16;
constexpr uint64_t kPieceElements = 1 << 20;

// Makes a job of the given number of Mi elements.
JobHarness::Setup SetupOf(const benchmark::State& state) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  for (int i = 0; i < kParameters; ++i) {
    setup.layout.parameters.push_back(MakeParameter(
        "p" + std::to_string(i), state.range(0) * (1 << 20) / kParameters));
  }
  setup.subgroup_elements = 0;
  return setup;
}

void LoadAll(const std::vector<float>& values, JobHarness* harness,
             benchmark::State* state) {
  const auto require = [state](const absl::Status& status) {
    if (!status.ok()) state->SkipWithError(status.ToString().c_str());
  };
  require(harness->job().BeginLoad(0));
  for (uint32_t p = 0; p < kParameters; ++p) {
    for (const auto array : {v1::STATE_ARRAY_MASTER, v1::STATE_ARRAY_STATE_0,
                             v1::STATE_ARRAY_STATE_1}) {
      for (uint64_t begin = 0; begin < values.size(); begin += kPieceElements) {
        const uint64_t count =
            std::min<uint64_t>(kPieceElements, values.size() - begin);
        require(harness->job().Load(
            0, array, p, begin, count, DType::kFloat32,
            absl::MakeConstSpan(
                reinterpret_cast<const std::byte*>(values.data() + begin),
                count * sizeof(float))));
      }
    }
  }
  require(harness->FinishAll().status);
}

std::vector<float> ValuesOf(const benchmark::State& state, float first) {
  std::vector<float> values(
      static_cast<size_t>(state.range(0) * (1 << 20) / kParameters));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = first + static_cast<float>(i % 1000) / 1000;
  }
  return values;
}

void SetBytes(benchmark::State* state) {
  state->SetBytesProcessed(static_cast<int64_t>(state->iterations()) *
                           state->range(0) * (1 << 20) * 12);
}

void BM_LoadIntoNewJob(benchmark::State& state) {
  const std::vector<float> values = ValuesOf(state, 1);
  for (auto _ : state) {
    state.PauseTiming();
    {
      JobHarness harness(SetupOf(state));
      harness.AttachAll();
      state.ResumeTiming();
      LoadAll(values, &harness, &state);
      state.PauseTiming();
    }
    state.ResumeTiming();
  }
  SetBytes(&state);
}

void BM_LoadIntoReadyJob(benchmark::State& state) {
  const std::vector<float> values[] = {ValuesOf(state, 1), ValuesOf(state, 2)};
  JobHarness harness(SetupOf(state));
  harness.AttachAll();
  LoadAll(values[0], &harness, &state);
  uint64_t loads = 0;
  for (auto _ : state) LoadAll(values[++loads % 2], &harness, &state);
  SetBytes(&state);
}

void BM_LoadOfWhatTheJobHas(benchmark::State& state) {
  const std::vector<float> values = ValuesOf(state, 1);
  JobHarness harness(SetupOf(state));
  harness.AttachAll();
  LoadAll(values, &harness, &state);
  for (auto _ : state) LoadAll(values, &harness, &state);
  SetBytes(&state);
}

#define OPTSTATE_LOAD_BENCHMARK(name) \
  BENCHMARK(name)->Arg(4)->Arg(64)->Unit(benchmark::kMillisecond)->UseRealTime()
OPTSTATE_LOAD_BENCHMARK(BM_LoadIntoNewJob);
OPTSTATE_LOAD_BENCHMARK(BM_LoadIntoReadyJob);
OPTSTATE_LOAD_BENCHMARK(BM_LoadOfWhatTheJobHas);

}  // namespace
}  // namespace optstate::session
