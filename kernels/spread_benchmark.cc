// Measures AdamW on arrays a multiple of 256 MiB apart against AdamW on the
// same pages, mapped where proto/shm/spread_mapping.h puts them, taking turns.
//   spread_over_beside  median over the iterations of the time of the former /
//                       the time of the latter
//
// Argument: elements. One thread.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "kernels/update_kernel.h"
#include "proto/shm/spread_mapping.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/unique_fd.h"

namespace optstate::kernels {
namespace {

constexpr size_t kArrays = 4;  // gradient, master, exp_avg, exp_avg_sq
constexpr uint64_t kApartBytes = uint64_t{256} << 20;

using Views = std::array<float*, kArrays>;

float* MapAt(void* address, uint64_t bytes, int fd) {
  void* const data = mmap(address, bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0);
  if (data == MAP_FAILED) std::abort();
  return static_cast<float*>(data);
}

void Update(const UpdateKernel& kernel, const UpdateFactors& factors,
            const Views& views, size_t numel) {
  for (size_t at = 0; at < numel; at += kTileElements) {
    const void* const gradient = views[0] + at;
    TileView view;
    view.gradients = absl::MakeConstSpan(&gradient, 1);
    view.parameter = view.master = views[1] + at;
    view.state[0] = views[2] + at;
    view.state[1] = views[3] + at;
    view.numel = std::min(kTileElements, numel - at);
    kernel.apply(factors, view);
  }
}

void BM_Spread(benchmark::State& state) {
  const auto numel = static_cast<size_t>(state.range(0));
  const uint64_t bytes = numel * sizeof(float);
  // The address is a multiple of 256 MiB, so that pages can be as large as the
  // others'.
  void* const reserved =
      mmap(nullptr, (kArrays + 1) * kApartBytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED || bytes > kApartBytes) std::abort();
  const uint64_t before = -reinterpret_cast<uintptr_t>(reserved) % kApartBytes;
  auto* const addresses = static_cast<std::byte*>(reserved) + before;
  Views beside;
  Views spread;
  for (size_t k = 0; k < kArrays; ++k) {
    const UniqueFd fd(memfd_create("spread", MFD_CLOEXEC));
    if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) std::abort();
    beside[k] = MapAt(addresses + k * kApartBytes, bytes, fd.get());
    void* const data = shm::MapSpread(fd.get(), bytes, PROT_READ | PROT_WRITE);
    if (data == MAP_FAILED) std::abort();
    spread[k] = static_cast<float*>(data);
    std::fill_n(spread[k], numel, 0.5f);
  }
  const UpdateKernel& kernel = **FindUpdateKernel(
      {OptimizerKind::kAdamW, /*options=*/0, DType::kFloat32, DType::kFloat32});
  UpdateInput input;
  input.hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
  input.step_count = 10;
  const UpdateFactors factors = kernel.prepare(input);

  const auto seconds = [&](const Views& views) {
    const auto begin = std::chrono::steady_clock::now();
    Update(kernel, factors, views, numel);
    const std::chrono::duration<double> took =
        std::chrono::steady_clock::now() - begin;
    return took.count();
  };
  std::vector<double> ratios;
  for (auto _ : state) {
    const double beside_s = seconds(beside);
    const double spread_s = seconds(spread);
    state.SetIterationTime(spread_s);
    ratios.push_back(beside_s / spread_s);
  }
  const auto middle =
      ratios.begin() + static_cast<ptrdiff_t>(ratios.size() / 2);
  std::nth_element(ratios.begin(), middle, ratios.end());
  state.counters["spread_over_beside"] = *middle;
  for (float* data : spread) shm::UnmapSpread(data, bytes);
  munmap(reserved, (kArrays + 1) * kApartBytes);
}

BENCHMARK(BM_Spread)
    ->Arg(1 << 20)
    ->Arg(16 << 20)
    ->Arg(64 << 20)
    ->UseManualTime();

}  // namespace
}  // namespace optstate::kernels
