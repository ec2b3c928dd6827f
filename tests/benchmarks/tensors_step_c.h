#ifndef OPTSTATE_TESTS_BENCHMARKS_TENSORS_STEP_C_H_
#define OPTSTATE_TESTS_BENCHMARKS_TENSORS_STEP_C_H_

#include <stddef.h>
#include <stdint.h>

// The functions that peers_benchmark.py calls by ctypes: AdamW on memory of
// torch tensors. No function is for two threads at a time.

#ifdef __cplusplus
extern "C" {
#endif

enum { kOptstateBenchGradientsMax = 8 };

// The memory of one tensor. State and scale are as in TileView.
typedef struct OptstateBenchTensor {
  const void* gradients[kOptstateBenchGradientsMax];
  void* parameter;
  void* master; /* of float32 parameters the parameter */
  void* state[2];
  float* scale[2];
  uint64_t numel;
} OptstateBenchTensor;

// The formats: `dtype` is of gradients and parameter; the others are numbers of
// proto/types.
typedef struct OptstateBenchFormat {
  uint32_t dtype;
  uint32_t state;
  uint32_t gradients;
  uint32_t master;
} OptstateBenchFormat;

typedef struct OptstateBenchInput {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double gradient_factor;
  int64_t step;
} OptstateBenchInput;

void* optstate_bench_open(int threads);
void optstate_bench_close(void* workers);

// Copies `tensors`, not what they point to. Null: no kernel has this format.
void* optstate_bench_plan(void* workers, const OptstateBenchFormat* format,
                          const OptstateBenchTensor* tensors, size_t count);
void optstate_bench_drop(void* plan);

void optstate_bench_update(void* plan, const OptstateBenchInput* input);
// Makes the additions of float32 state. `blocks`: AdditionsOrder::kBlocks.
void optstate_bench_add_only(void* plan, int blocks);

#ifdef __cplusplus
}
#endif

#endif  // OPTSTATE_TESTS_BENCHMARKS_TENSORS_STEP_C_H_
