// Measures the product of two square matrices on one core, by target and size.

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/targets.h"

namespace optstate::kernels::cpu {
namespace {

struct FreeDeleter {
  void operator()(float* array) const { std::free(array); }
};

void BM_MatMul(benchmark::State& state, Target target, bool is_gram) {
  const size_t size = static_cast<size_t>(state.range(0));
  const std::vector<float> a(size * size, 0.5f);
  std::vector<float> result(size * size);
  const size_t bytes = MatMulWorkspaceElements(size) * sizeof(float);
  const std::unique_ptr<float, FreeDeleter> workspace(
      static_cast<float*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
  MatMul matmul;
  matmul.rows = matmul.columns = matmul.depth = size;
  matmul.a = matmul.b = a.data();
  matmul.b_is_transposed = matmul.is_symmetric = is_gram;
  matmul.result = result.data();
  matmul.workspace = workspace.get();
  for (auto _ : state) {
    MultiplyOn(target, matmul);
    benchmark::ClobberMemory();
  }
  // The count is of the whole product, for a gram matrix too, of which half is
  // copied.
  state.counters["flops"] =
      benchmark::Counter(2.0 * static_cast<double>(size * size * size),
                         benchmark::Counter::kIsIterationInvariantRate);
}

[[maybe_unused]] const int kRegistered = [] {
  for (Target target : SupportedTargets()) {
    for (bool is_gram : {false, true}) {
      const std::string name =
          std::string(is_gram ? "Gram/" : "Product/") + TargetName(target);
      benchmark::RegisterBenchmark(name.c_str(), BM_MatMul, target, is_gram)
          ->Arg(256)
          ->Arg(1024)
          ->Arg(4096);
    }
  }
  return 0;
}();

}  // namespace
}  // namespace optstate::kernels::cpu
