#include "tests/benchmarks/tensors_step_c.h"

#include "proto/types/optimizer.h"
#include "tests/benchmarks/tensors_step.h"

#define OPTSTATE_EXPORT __attribute__((visibility("default")))

using optstate::TensorsStep;
using optstate::Workers;

OPTSTATE_EXPORT void* optstate_bench_open(int threads) {
  return new Workers(threads);
}

OPTSTATE_EXPORT void optstate_bench_close(void* workers) {
  delete static_cast<Workers*>(workers);
}

OPTSTATE_EXPORT void* optstate_bench_plan(void* workers,
                                          const OptstateBenchFormat* format,
                                          const OptstateBenchTensor* tensors,
                                          size_t count) {
  if (!optstate::IsValidDType(format->dtype) || format->gradients < 1 ||
      format->gradients > kOptstateBenchGradientsMax) {
    return nullptr;
  }
  optstate::kernels::UpdateKernelKey key;
  key.gradient = static_cast<optstate::DType>(format->dtype);
  key.parameter = key.gradient;
  key.state = static_cast<optstate::StateFormat>(format->state);
  key.master = static_cast<optstate::MasterFormat>(format->master);
  auto step = TensorsStep::Create(key, format->gradients,
                                  absl::MakeConstSpan(tensors, count),
                                  static_cast<Workers*>(workers));
  return step.ok() ? step->release() : nullptr;
}

OPTSTATE_EXPORT void optstate_bench_drop(void* plan) {
  delete static_cast<TensorsStep*>(plan);
}

OPTSTATE_EXPORT void optstate_bench_update(void* plan,
                                           const OptstateBenchInput* input) {
  optstate::AdamHyperparams adam;
  adam.lr = input->lr;
  adam.beta1 = input->beta1;
  adam.beta2 = input->beta2;
  adam.eps = input->eps;
  adam.weight_decay = input->weight_decay;
  optstate::kernels::UpdateInput update;
  update.hyperparams = adam;
  update.step_count = input->step;
  update.step = static_cast<uint64_t>(input->step);
  update.gradient_factor = input->gradient_factor;
  static_cast<TensorsStep*>(plan)->Update(update);
}

OPTSTATE_EXPORT void optstate_bench_add_only(void* plan, int blocks) {
  static_cast<TensorsStep*>(plan)->AddOnly(
      blocks ? optstate::AdditionsOrder::kBlocks
             : optstate::AdditionsOrder::kVectors);
}
