#ifndef OPTSTATE_KERNELS_CUDA_BLOCK_KERNELS_H_
#define OPTSTATE_KERNELS_CUDA_BLOCK_KERNELS_H_

// The work of one block of threads, for CUDA and for the loops of
// serial_block.h.
//
// A block is a class with
//   template <class T> using PerThread = ...;  // values[t] of thread t
//   template <class Phase> void Run(const Phase& phase) const;
//       // calls phase(t) for each thread t < kBlockThreads; afterwards every
//       // thread sees what the others wrote
//   static void Raise(int32_t* largest, int32_t value);
//       // *largest becomes the larger one; threads may call it at a time
// Code outside of phases is run by every thread, or once.

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/cuda/tile_task.h"
#include "kernels/ops/host_device.h"
#include "kernels/reduction.h"
#include "kernels/reduction_order.h"
#include "kernels/rules/rule-inl.h"
#include "kernels/scalar/element_update.h"
#include "kernels/scalar/vector_update.h"
#include "kernels/update_kernel.h"
// This include comes after scalar_ops.h.
#include "kernels/ops/reduction-inl.h"

namespace optstate::kernels::cuda {

// With kDynamic8 a thread has one element of a block of codes.
inline constexpr uint32_t kBlockThreads = kQuantizedBlockElements;

// A thread has one accumulator, and a block of threads so many arrays.
inline constexpr uint32_t kBlockArrays =
    kBlockThreads / static_cast<uint32_t>(kReductionAccumulators);

// Memory that the threads of a block share.
struct UpdateShared {
  int32_t largest[kStateArraysMax];
};
struct ReduceShared {
  double accumulators[kBlockThreads];
};

// Updates a tile with kDynamic8, a block of codes after the other.
template <class Rule, class Block>
OPTSTATE_HOST_DEVICE void UpdateCodes(const Block& block, const TileTask& task,
                                      const scalar::GradientScale& scale,
                                      const Rule& rule, UpdateShared* shared) {
  typename Block::template PerThread<scalar::BlockStates> states;
  for (uint64_t begin = task.begin; begin < task.numel;
       begin += kBlockThreads) {
    block.Run([&](uint32_t t) {
      if (t < kStateArraysMax) shared->largest[t] = 0;
    });
    block.Run([&](uint32_t t) {
      if (begin + t >= task.numel) return;
      states[t] = scalar::BeginBlockElement(scale, rule, task.tile, begin + t);
      for (int k = 0; k < kStateArraysMax; ++k) {
        Block::Raise(&shared->largest[k],
                     scalar::MagnitudeBits(states[t].state[k]));
      }
    });
    block.Run([&](uint32_t t) {
      if (begin + t >= task.numel) return;
      for (int k = 0; k < kStateArraysMax; ++k) {
        if (!scalar::HasState<Rule>(k)) continue;
        const float block_scale = scalar::ScaleOf(shared->largest[k]);
        if (t == 0) {
          task.tile.scale[k][begin / kQuantizedBlockElements] = block_scale;
        }
        scalar::EndBlockElement<Rule>(task.tile, k, begin + t,
                                      states[t].state[k], block_scale);
      }
    });
  }
}

// Updates a tile as UpdateKernel::apply does, with equal bits.
template <class Rule, class Block>
OPTSTATE_HOST_DEVICE void UpdateTile(const Block& block, const TileTask& task,
                                     const UpdateFactors& factors,
                                     UpdateShared* shared) {
  const scalar::GradientScale scale(factors);
  const Rule rule(factors);
  if (task.tile.state_format == StateFormat::kDynamic8) {
    UpdateCodes(block, task, scale, rule, shared);
    return;
  }
  constexpr uint64_t kElements = scalar::kVectorElements;
  const uint64_t vectors =
      task.begin < task.numel && scalar::HasVectors<Rule>(task.tile, task.begin)
          ? (task.numel - task.begin) / kElements
          : 0;
  block.Run([&](uint32_t t) {
    for (uint64_t i = t; i < vectors; i += kBlockThreads) {
      scalar::UpdateVector(scale, rule, task.tile, task.begin + i * kElements);
    }
    for (uint64_t i = task.begin + vectors * kElements + t; i < task.numel;
         i += kBlockThreads) {
      scalar::UpdateElement(scale, rule, task.tile, i);
    }
  });
}

// Reduces arrays [first, first + kBlockArrays) of `count`, as far as there are
// so many, in the order of reduction_order.h. Sets *found_inf where a result is
// non-finite.
template <Reduction kReduction, class Block>
OPTSTATE_HOST_DEVICE void ReduceArrays(const Block& block,
                                       const ReduceTask* tasks, uint32_t first,
                                       uint32_t count, double* results,
                                       uint32_t* found_inf,
                                       ReduceShared* shared) {
  constexpr uint32_t kLanes = static_cast<uint32_t>(kReductionAccumulators);
  block.Run([&](uint32_t t) {
    if (first + t / kLanes >= count) return;
    const ReduceTask& task = tasks[first + t / kLanes];
    double accumulator = 0;
    for (uint64_t i = t % kLanes; i < task.numel; i += kLanes) {
      const double element = task.gradient.Load(scalar::ops::FloatTag(), i);
      accumulator = scalar::Taken<kReduction>(accumulator, element);
    }
    shared->accumulators[t] = accumulator;
  });
  block.Run([&](uint32_t t) {
    if (t >= kBlockArrays || first + t >= count) return;
    const double result =
        ResultOfAccumulators(kReduction, shared->accumulators + t * kLanes);
    results[first + t] = result;
    // Comparisons with NaN are false.
    const bool is_finite =
        scalar::ops::Abs(result) <= std::numeric_limits<double>::max();
    if (!is_finite) *found_inf = 1;
  });
}

// Adds the results of each parameter's tiles, in order; a thread has one
// parameter.
OPTSTATE_HOST_DEVICE inline void AddTiles(const ParameterTasks& parameter,
                                          const double* results, double* sum) {
  double its_sum = 0;
  for (uint32_t k = parameter.begin; k < parameter.end; ++k) {
    its_sum = scalar::ops::Add(its_sum, results[k]);
  }
  *sum = its_sum;
}

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_BLOCK_KERNELS_H_
