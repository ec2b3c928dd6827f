// Measures what the daemon costs. Each benchmark takes turns with what it is
// measured against, so that both see the same machine, and reports the median
// of the single ratios.
//
//   Step/DTYPE/elements    push and commit in place, over shared memory
//     commit_ratio   kernel alone / commit. Pushes come while gradients are
//                    still being made, so this is what the trainer waits for.
//     step_ratio     kernel alone / push and commit, nothing overlapped
//     work_ratio     the same work (sum of squares and kernel) / push and
//     commit
//   ShmPayload/mib         PushGradients of memory that lies elsewhere
//     memcpy_ratio   memcpy of the same bytes / PushGradients
//   GrpcUpload/mib         the same over gRPC on a unix socket
//   Reattach/mib           opening a session of a job with so much state, as a
//                          new process does: its gradients' pages are cleared
//   EngineKilled/mib       from the end of such a job's engine between steps
//                          until the next one has answered its rank
//     kill_ms        from SIGKILL to that end: the kernel unmaps its memory

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "client/client.h"
#include "tests/benchmarks/benchmark_daemon.h"
#include "tests/benchmarks/kernel_alone.h"
#include "tests/benchmarks/median.h"
#include "tests/conformance/step_script.h"

namespace optstate {
namespace {

using Clock = std::chrono::steady_clock;
using client::Session;

// Parameters have at most this many elements, as a model's have.
constexpr int64_t kParameterElements = 4 << 20;
constexpr int kGradientByte = 0x3f;
// The state is fp32 parameter, master, exp_avg and exp_avg_sq.
constexpr int64_t kStateBytesPerElement = 16;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

LayoutSpec LayoutOf(DType dtype, int64_t elements) {
  LayoutSpec layout = UniformLayout(0, 0);
  for (int64_t begin = 0; begin < elements; begin += kParameterElements) {
    const int64_t numel = std::min(kParameterElements, elements - begin);
    layout.parameters.push_back({.name = absl::StrCat("p", begin),
                                 .shape = {numel},
                                 .numel = numel,
                                 .dtype = dtype,
                                 .gradient_dtype = dtype,
                                 .group = 0});
  }
  return layout;
}

client::SessionOptions OptionsOf(LayoutSpec layout,
                                 const std::string& endpoint) {
  client::SessionOptions options = NewJob(std::move(layout));
  options.endpoint = endpoint;
  options.ephemeral = true;
  return options;
}

// Opens a loaded job; null, with the benchmark marked as failed, when there is
// none.
std::unique_ptr<Session> OpenLoaded(benchmark::State& state,
                                    client::SessionOptions options) {
  auto session = Session::Open(std::move(options));
  absl::Status status = session.status();
  if (status.ok()) status = LoadConstant(**session, 1);
  if (status.ok()) return *std::move(session);
  state.SkipWithError(status.ToString().c_str());
  return nullptr;
}

void FillGradients(Session& session) {
  for (size_t i = 0; i < session.piece_count(); ++i) {
    const absl::Span<std::byte> gradient = session.gradient(i).value();
    std::memset(gradient.data(), kGradientByte, gradient.size());
  }
}

struct StepTimes {
  double push = 0;
  double commit = 0;
};

absl::StatusOr<StepTimes> TakeStep(Session& session,
                                   const client::CommitOptions& commit) {
  StepTimes times;
  auto begin = Clock::now();
  absl::Status status =
      session.Push(commit.step, 0, 0,
                   static_cast<uint32_t>(session.layout().parameters().size()));
  if (status.ok()) status = session.Flush();
  if (!status.ok()) return status;
  times.push = SecondsSince(begin);
  begin = Clock::now();
  status = session.Commit(commit).status();
  if (!status.ok()) return status;
  times.commit = SecondsSince(begin);
  return times;
}

void BM_Step(benchmark::State& state, DType dtype) {
  const int64_t elements = state.range(0);
  const auto session = OpenLoaded(
      state, OptionsOf(LayoutOf(dtype, elements), Daemon().shm_endpoint()));
  if (session == nullptr) return;
  FillGradients(*session);
  const auto status = Daemon().GetStatus();
  const auto alone = KernelAlone::Create(dtype, static_cast<size_t>(elements),
                                         status.ok() ? status->workers() : 1);
  if (!alone.ok())
    return state.SkipWithError(alone.status().ToString().c_str());
  client::CommitOptions commit = CommitOf(*session, 1);
  // The first step maps pages on either side.
  static_cast<void>(TakeStep(*session, commit));
  (*alone)->Update();
  commit.step = session->committed_step() + 1;
  std::vector<double> commit_ratio, step_ratio, work_ratio, step_ms;
  for (auto _ : state) {
    const auto times = TakeStep(*session, commit);
    if (!times.ok()) {
      return state.SkipWithError(times.status().ToString().c_str());
    }
    ++commit.step;
    const double kernel = (*alone)->Update();
    const double sum = (*alone)->SumOfSquares();
    const double step = times->push + times->commit;
    state.SetIterationTime(step);
    commit_ratio.push_back(kernel / times->commit);
    step_ratio.push_back(kernel / step);
    work_ratio.push_back((kernel + sum) / step);
    step_ms.push_back(step * 1e3);
  }
  state.counters["commit_ratio"] = Median(commit_ratio);
  state.counters["step_ratio"] = Median(step_ratio);
  state.counters["work_ratio"] = Median(work_ratio);
  state.counters["step_ms"] = Median(step_ms);
}

void Upload(benchmark::State& state, const std::string& endpoint) {
  const int64_t bytes = state.range(0) << 20;
  const auto session = OpenLoaded(
      state, OptionsOf(LayoutOf(DType::kFloat32, bytes / 4), endpoint));
  if (session == nullptr) return;
  const std::vector<std::byte> source(static_cast<size_t>(bytes),
                                      std::byte{kGradientByte});
  std::vector<std::byte> target(source.size());
  std::vector<uint32_t> parameters;
  std::vector<const void*> gradients;
  for (uint32_t i = 0; i < session->layout().parameters().size(); ++i) {
    parameters.push_back(i);
    gradients.push_back(source.data() + i * kParameterElements * 4);
  }
  std::vector<double> ratio;
  for (auto _ : state) {
    auto begin = Clock::now();
    absl::Status status = session->PushGradients(1, 0, parameters, gradients);
    if (status.ok()) status = session->Flush();
    const double push = SecondsSince(begin);
    begin = Clock::now();
    std::memcpy(target.data(), source.data(), source.size());
    benchmark::ClobberMemory();
    ratio.push_back(SecondsSince(begin) / push);
    state.SetIterationTime(push);
    if (status.ok()) status = session->Abort(1);
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
  }
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["memcpy_ratio"] = Median(ratio);
}

void BM_ShmPayload(benchmark::State& state) {
  Upload(state, Daemon().shm_endpoint());
}

void BM_GrpcUpload(benchmark::State& state) {
  Upload(state, Daemon().grpc_endpoint());
}

void BM_Reattach(benchmark::State& state) {
  const int64_t elements = (state.range(0) << 20) / kStateBytesPerElement;
  client::SessionOptions options =
      OptionsOf(LayoutOf(DType::kFloat32, elements), Daemon().shm_endpoint());
  options.ephemeral = false;
  auto session = OpenLoaded(state, options);
  // Pages of the state are those of a job that trains.
  if (session != nullptr) {
    static_cast<void>(TakeStep(*session, CommitOf(*session, 1)));
  }
  std::vector<double> open_ms;
  for (auto _ : state) {
    if (session != nullptr) session->Close();
    session.reset();
    const auto begin = Clock::now();
    auto opened = Session::Open(options);
    const double seconds = SecondsSince(begin);
    if (!opened.ok()) {
      return state.SkipWithError(opened.status().ToString().c_str());
    }
    session = *std::move(opened);
    open_ms.push_back(seconds * 1e3);
    state.SetIterationTime(seconds);
  }
  state.counters["open_ms"] = Median(open_ms);
}

void BM_EngineKilled(benchmark::State& state) {
  const int64_t elements = (state.range(0) << 20) / kStateBytesPerElement;
  const client::SessionOptions options =
      OptionsOf(LayoutOf(DType::kFloat32, elements), Daemon().shm_endpoint());
  const auto session = OpenLoaded(state, options);
  if (session == nullptr) return;
  static_cast<void>(TakeStep(*session, CommitOf(*session, 1)));
  for (auto _ : state) {
    const auto kill = Clock::now();
    absl::Status status = Daemon().KillEngine(options.job);
    state.counters["kill_ms"] = SecondsSince(kill) * 1e3;
    const auto end = Clock::now();
    if (status.ok()) status = session->Abort(2);
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
    state.SetIterationTime(SecondsSince(end));
  }
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  for (const int64_t elements : {1 << 20, 16 << 20, 64 << 20}) {
    benchmark->Arg(elements);
  }
  benchmark->UseManualTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(BM_Step, float32, DType::kFloat32)->Apply(Sizes);
BENCHMARK_CAPTURE(BM_Step, bfloat16, DType::kBFloat16)->Apply(Sizes);
BENCHMARK(BM_ShmPayload)
    ->Arg(1)
    ->Arg(64)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(BM_GrpcUpload)
    ->Arg(1)
    ->Arg(64)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(BM_Reattach)
    ->Arg(16)
    ->Arg(1024)
    ->Arg(4096)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
// Few deaths are measured: after more within a minute the supervisor would wait
// for a while.
BENCHMARK(BM_EngineKilled)
    ->Arg(16)
    ->Arg(4096)
    ->Iterations(1)
    ->Repetitions(5)
    ->ReportAggregatesOnly()
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace optstate
