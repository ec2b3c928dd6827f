#ifndef OPTSTATE_KERNELS_CUDA_WHOLE_BLOCKS_H_
#define OPTSTATE_KERNELS_CUDA_WHOLE_BLOCKS_H_

// The work of one block of threads for optimizers that need whole parameters,
// for CUDA and for the loops of serial_block.h. What a block is,
// block_kernels.h says.
//
// An update is a few phases, each a launch of its own: a block reads what the
// blocks of the phases before have written, and nothing that others of its own
// phase write. Many blocks share the elements of a parameter. A norm is one
// block's work, because its sum has one order (reduction_order.h): of the whole
// parameter as one array, as on the CPU.

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/block_kernels.h"
#include "kernels/cuda/block_product.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/ops/host_device.h"
#include "kernels/reduction.h"
#include "kernels/reduction_order.h"
// This include comes after scalar_ops.h.
#include "kernels/ops/reduction-inl.h"

namespace optstate::kernels::cuda {

enum class WholePhase : uint8_t {
  kVariances,  // Adafactor's, of rows and of columns
  kMeans,      // of the variances of rows
  kUpdate,     // of each element, and the states that belong to it
  kNorms,      // of the masters and of the updates, and what follows from them
  kScale,      // Muon's, of the updates by their norm
  // Muon's, in rounds: x @ x^T, a polynomial of it, and its product with x.
  kGram,
  kGramUpdate,
  kProduct,
  kDescent,  // of the masters
};

// The blocks that share one task in a phase. `part` below is a block's number
// among them.
constexpr uint32_t WholeParts(WholePhase phase) {
  constexpr uint32_t kParts = 64;
  // A product has most to do.
  constexpr uint32_t kProductParts = 256;
  switch (phase) {
    case WholePhase::kNorms:
      return 1;
    case WholePhase::kGram:
    case WholePhase::kGramUpdate:
    case WholePhase::kProduct:
      return kProductParts;
    default:
      return kParts;
  }
}

// Memory that the threads of a block share.
struct WholeShared {
  // Elements of both arrays whose norms are taken. Accumulators of the one are
  // in other banks than those of the other.
  static constexpr uint32_t kStaged = 2048;
  static_assert(kStaged % kReductionAccumulators == 0);
  union {
    float staged[2][kStaged + kReductionAccumulators];
    ProductShared product;
  };
  double accumulators[kBlockThreads];
};

inline constexpr uint32_t kWholeLanes =
    static_cast<uint32_t>(kReductionAccumulators);

// LAMB's part of the phases.
struct WholeLamb {
  static constexpr bool kHasVariances = false;
  static constexpr bool kHasProducts = false;

  OPTSTATE_HOST_DEVICE static void UpdateElement(const WholeTask& task,
                                                 uint64_t i) {
    float exp_avg = task.state[0][i];
    float exp_avg_sq = task.state[1][i];
    task.gradient[i] = scalar::LambUpdate(scalar::ops::FloatTag(),
                                          task.factors.lamb, task.gradient[i],
                                          task.master[i], exp_avg, exp_avg_sq);
    task.state[0][i] = exp_avg;
    task.state[1][i] = exp_avg_sq;
  }

  OPTSTATE_HOST_DEVICE static DescentFactors Descent(const WholeTask& task,
                                                     double master_squares,
                                                     double update_squares) {
    return LambDescent(task.factors.lr, master_squares, update_squares);
  }
};

// Adafactor's. Its state arrays: variances of rows, of columns, of elements.
struct WholeAdafactor {
  static constexpr bool kHasVariances = true;
  static constexpr bool kHasProducts = false;

  // Updates an element of a parameter that has no columns.
  OPTSTATE_HOST_DEVICE static void UpdateElement(const WholeTask& task,
                                                 uint64_t i) {
    const scalar::ops::FloatTag d;
    const float grad = task.gradient[i];
    const float variance = scalar::NextElementVariance(
        d, task.state[2][i], grad, task.factors.element_weight);
    task.state[2][i] = variance;
    task.gradient[i] = scalar::Normalized(d, grad, variance,
                                          task.factors.adafactor.variance_min);
  }

  OPTSTATE_HOST_DEVICE static DescentFactors Descent(const WholeTask& task,
                                                     double master_squares,
                                                     double update_squares) {
    return AdafactorDescent(task.factors.adafactor, master_squares,
                            update_squares, task.numel);
  }
};

// Muon's part of the phases.
struct WholeMuon {
  static constexpr bool kHasVariances = false;
  static constexpr bool kHasProducts = true;

  OPTSTATE_HOST_DEVICE static void UpdateElement(const WholeTask& task,
                                                 uint64_t i) {
    float buffer = task.state[0][i];
    const float update =
        scalar::MuonMomentum(scalar::ops::FloatTag(), task.factors.muon.weights,
                             task.gradient[i], buffer);
    task.state[0][i] = buffer;
    MuonMatricesOf(task, 0).x[MuonPlace(task, i)] = update;
  }

  OPTSTATE_HOST_DEVICE static DescentFactors Descent(const WholeTask& task,
                                                     double /*master_squares*/,
                                                     double update_squares) {
    return {0, scalar::MuonDivisor(task.factors.muon.eps, update_squares)};
  }
};

// Reduces arrays `first` and the next ones, one for each kWholeLanes threads,
// of `numel` elements each; `arrays` is their number in all. Their accumulators
// are then in `shared`.
template <Reduction kReduction, class Block>
OPTSTATE_HOST_DEVICE void AccumulateArrays(const Block& block,
                                           const float* elements,
                                           uint64_t numel, uint64_t first,
                                           uint64_t arrays,
                                           WholeShared* shared) {
  block.Run([&](uint32_t t) {
    const uint64_t array = first + t / kWholeLanes;
    if (array >= arrays) return;
    const float* const its = elements + array * numel;
    double accumulator = 0;
    for (uint64_t i = t % kWholeLanes; i < numel; i += kWholeLanes) {
      const double element = its[i];
      accumulator = scalar::Taken<kReduction>(accumulator, element);
    }
    shared->accumulators[t] = accumulator;
  });
}

// Updates the variances of this part's rows.
template <class Block>
OPTSTATE_HOST_DEVICE void UpdateRowVariances(const Block& block,
                                             const WholeTask& task,
                                             uint32_t part,
                                             WholeShared* shared) {
  constexpr uint64_t kStride =
      uint64_t{WholeParts(WholePhase::kVariances)} * kBlockArrays;
  const double columns = static_cast<double>(task.columns);
  for (uint64_t first = uint64_t{part} * kBlockArrays; first < task.all_rows;
       first += kStride) {
    AccumulateArrays<Reduction::kSumOfSquares>(
        block, task.gradient, task.columns, first, task.all_rows, shared);
    block.Run([&](uint32_t t) {
      const uint64_t row = first + t;
      if (t >= kBlockArrays || row >= task.all_rows) return;
      const double sum = ResultOfAccumulators(
          Reduction::kSumOfSquares, shared->accumulators + t * kWholeLanes);
      task.state[0][row] = scalar::NextVariance(
          task.state[0][row], sum / columns, task.factors.adafactor.weight);
    });
  }
}

// Updates those of this part's columns; a thread adds the squares of one from
// the first row to the last.
template <class Block>
OPTSTATE_HOST_DEVICE void UpdateColumnVariances(const Block& block,
                                                const WholeTask& task,
                                                uint32_t part) {
  constexpr uint64_t kStride =
      uint64_t{WholeParts(WholePhase::kVariances)} * kBlockThreads;
  const double rows = static_cast<double>(task.rows);
  block.Run([&](uint32_t t) {
    for (uint64_t k = uint64_t{part} * kBlockThreads + t; k < task.all_columns;
         k += kStride) {
      const uint64_t matrix = k / task.columns;
      const uint64_t column = k - matrix * task.columns;
      const float* const elements =
          task.gradient + matrix * task.rows * task.columns + column;
      double sum = 0;
      for (uint64_t i = 0; i < task.rows; ++i) {
        const double element = elements[i * task.columns];
        sum = scalar::Taken<Reduction::kSumOfSquares>(sum, element);
      }
      task.state[1][k] = scalar::NextVariance(task.state[1][k], sum / rows,
                                              task.factors.adafactor.weight);
    }
  });
}

// Computes the means of the variances of this part's matrices.
template <class Block>
OPTSTATE_HOST_DEVICE void ComputeMeans(const Block& block,
                                       const WholeTask& task, uint32_t part,
                                       WholeShared* shared) {
  constexpr uint64_t kStride =
      uint64_t{WholeParts(WholePhase::kMeans)} * kBlockArrays;
  if (task.columns == 0) return;
  const uint64_t matrices = task.all_columns / task.columns;
  const double rows = static_cast<double>(task.rows);
  for (uint64_t first = uint64_t{part} * kBlockArrays; first < matrices;
       first += kStride) {
    // The variances are not negative: the sum of absolutes is their sum.
    AccumulateArrays<Reduction::kSumOfAbsolutes>(
        block, task.state[0], task.rows, first, matrices, shared);
    block.Run([&](uint32_t t) {
      const uint64_t matrix = first + t;
      if (t >= kBlockArrays || matrix >= matrices) return;
      const double sum = ResultOfAccumulators(
          Reduction::kSumOfAbsolutes, shared->accumulators + t * kWholeLanes);
      task.means[matrix] = AtLeast(sum / rows, task.factors.adafactor.mean_min);
    });
  }
}

// Makes updates of the gradients of this part's rows, each divided by the root
// of its row's and its column's variance.
template <class Block>
OPTSTATE_HOST_DEVICE void UpdateRows(const Block& block, const WholeTask& task,
                                     uint32_t part) {
  constexpr uint64_t kStride =
      uint64_t{WholeParts(WholePhase::kUpdate)} * kBlockArrays;
  const scalar::ops::FloatTag d;
  block.Run([&](uint32_t t) {
    for (uint64_t row = uint64_t{part} * kBlockArrays + t / kWholeLanes;
         row < task.all_rows; row += kStride) {
      const uint64_t matrix = row / task.rows;
      const float row_variance =
          Rounded(task.state[0][row] / task.means[matrix]);
      const float* const column_variances =
          task.state[1] + matrix * task.columns;
      float* const elements = task.gradient + row * task.columns;
      for (uint64_t j = t % kWholeLanes; j < task.columns; j += kWholeLanes) {
        const float variance =
            scalar::ops::Product(row_variance, column_variances[j]);
        elements[j] = scalar::Normalized(d, elements[j], variance,
                                         task.factors.adafactor.variance_min);
      }
    }
  });
}

template <class Rule, class Block>
OPTSTATE_HOST_DEVICE void UpdateElements(const Block& block,
                                         const WholeTask& task, uint32_t part) {
  constexpr uint64_t kStride =
      uint64_t{WholeParts(WholePhase::kUpdate)} * kBlockThreads;
  block.Run([&](uint32_t t) {
    for (uint64_t i = uint64_t{part} * kBlockThreads + t; i < task.numel;
         i += kStride) {
      Rule::UpdateElement(task, i);
    }
  });
}

// Sums the squares of the masters and of the updates, and computes the descent.
// All threads bring elements; one for each accumulator takes them, in order.
template <class Rule, class Block>
OPTSTATE_HOST_DEVICE void ComputeNorms(const Block& block,
                                       const WholeTask& task,
                                       WholeShared* shared) {
  constexpr uint64_t kStaged = WholeShared::kStaged;
  const float* updates = task.gradient;
  if constexpr (Rule::kHasProducts) updates = MuonMatricesOf(task, 0).x;
  block.Run([&](uint32_t t) { shared->accumulators[t] = 0; });
  for (uint64_t begin = 0; begin < task.numel; begin += kStaged) {
    const uint64_t count =
        task.numel - begin < kStaged ? task.numel - begin : kStaged;
    block.Run([&](uint32_t t) {
      for (uint64_t i = t; i < count; i += kBlockThreads) {
        shared->staged[0][i] = task.master[begin + i];
        shared->staged[1][i] = updates[begin + i];
      }
    });
    block.Run([&](uint32_t t) {
      if (t >= 2 * kWholeLanes) return;
      const float* const elements = shared->staged[t / kWholeLanes];
      double accumulator = shared->accumulators[t];
      for (uint64_t i = t % kWholeLanes; i < count; i += kWholeLanes) {
        const double element = elements[i];
        accumulator =
            scalar::Taken<Reduction::kSumOfSquares>(accumulator, element);
      }
      shared->accumulators[t] = accumulator;
    });
  }
  block.Run([&](uint32_t t) {
    if (t != 0) return;
    const double master_squares =
        ResultOfAccumulators(Reduction::kSumOfSquares, shared->accumulators);
    const double update_squares = ResultOfAccumulators(
        Reduction::kSumOfSquares, shared->accumulators + kWholeLanes);
    *task.descent = Rule::Descent(task, master_squares, update_squares);
  });
}

template <class Block>
OPTSTATE_HOST_DEVICE void ScaleElements(const Block& block,
                                        const WholeTask& task, uint32_t part) {
  constexpr uint64_t kStride =
      uint64_t{WholeParts(WholePhase::kScale)} * kBlockThreads;
  const scalar::ops::FloatTag d;
  const float divisor = task.descent->step;
  float* const x = MuonMatricesOf(task, 0).x;
  block.Run([&](uint32_t t) {
    for (uint64_t i = uint64_t{part} * kBlockThreads + t; i < task.numel;
         i += kStride) {
      x[i] = scalar::MuonNormalized(d, x[i], divisor);
    }
  });
}

// Computes this part of one product of a round of Newton-Schulz: next = a * x +
// (b * gram + c * gram @ gram) @ x, gram = x @ x^T.
template <WholePhase kPhase, class Block>
OPTSTATE_HOST_DEVICE void MultiplyMatrices(const Block& block,
                                           const WholeTask& task, uint32_t part,
                                           uint32_t round,
                                           WholeShared* shared) {
  constexpr uint32_t kParts = WholeParts(kPhase);
  const MuonFactors& muon = task.factors.muon;
  if (round >= muon.steps) return;
  const MuonMatrices matrices = MuonMatricesOf(task, round);
  BlockProduct product = {};
  product.rows = task.rows;
  product.alpha = 1;
  if constexpr (kPhase == WholePhase::kGram) {
    product.columns = task.rows;
    product.depth = task.columns;
    product.a = matrices.x;
    product.b = matrices.x;
    product.b_is_transposed = true;
    product.is_symmetric = true;
    product.result = matrices.gram;
  } else if constexpr (kPhase == WholePhase::kGramUpdate) {
    product.columns = task.rows;
    product.depth = task.rows;
    product.a = matrices.gram;
    product.b = matrices.gram;
    product.is_symmetric = true;
    product.alpha = muon.c;
    product.beta = muon.b;
    product.addend = matrices.gram;
    product.result = matrices.gram_update;
  } else {
    product.columns = task.columns;
    product.depth = task.rows;
    product.a = matrices.gram_update;
    product.b = matrices.x;
    product.beta = muon.a;
    product.addend = matrices.x;
    product.result = matrices.next;
  }
  MultiplyTiles(block, product, part, kParts, &shared->product);
}

template <class Rule, class Block>
OPTSTATE_HOST_DEVICE void DescendElements(const Block& block,
                                          const WholeTask& task,
                                          uint32_t part) {
  constexpr uint64_t kStride =
      uint64_t{WholeParts(WholePhase::kDescent)} * kBlockThreads;
  const scalar::ops::FloatTag d;
  DescentFactors descent = *task.descent;
  const float* updates = task.gradient;
  if constexpr (Rule::kHasProducts) {
    descent = task.factors.muon.descent;
    updates = MuonMatricesOf(task, task.factors.muon.steps).x;
  }
  block.Run([&](uint32_t t) {
    for (uint64_t i = uint64_t{part} * kBlockThreads + t; i < task.numel;
         i += kStride) {
      const uint64_t place = Rule::kHasProducts ? MuonPlace(task, i) : i;
      task.master[i] = scalar::Descended(d, task.master[i], updates[place],
                                         descent.decay, descent.step);
    }
  });
}

// Does a block's part of a phase, in this round of it.
template <class Rule, WholePhase kPhase, class Block>
OPTSTATE_HOST_DEVICE void RunWholePhase(const Block& block,
                                        const WholeTask& task, uint32_t part,
                                        uint32_t round, WholeShared* shared) {
  if constexpr (kPhase == WholePhase::kVariances) {
    UpdateRowVariances(block, task, part, shared);
    UpdateColumnVariances(block, task, part);
  } else if constexpr (kPhase == WholePhase::kMeans) {
    ComputeMeans(block, task, part, shared);
  } else if constexpr (kPhase == WholePhase::kUpdate) {
    if (Rule::kHasVariances && task.columns != 0) {
      UpdateRows(block, task, part);
    } else {
      UpdateElements<Rule>(block, task, part);
    }
  } else if constexpr (kPhase == WholePhase::kNorms) {
    ComputeNorms<Rule>(block, task, shared);
  } else if constexpr (kPhase == WholePhase::kScale) {
    ScaleElements(block, task, part);
  } else if constexpr (kPhase == WholePhase::kDescent) {
    DescendElements<Rule>(block, task, part);
  } else {
    MultiplyMatrices<kPhase>(block, task, part, round, shared);
  }
}

// Calls visit.operator()<kPhase>(round) for the phases of a rule, in order,
// until one returns false. Returns whether all were visited. `rounds`:
// RoundsOf() the tasks.
template <class Rule, class Visit>
bool VisitWholePhases(uint32_t rounds, const Visit& visit) {
  if constexpr (Rule::kHasVariances) {
    if (!visit.template operator()<WholePhase::kVariances>(0)) return false;
    if (!visit.template operator()<WholePhase::kMeans>(0)) return false;
  }
  if (!visit.template operator()<WholePhase::kUpdate>(0)) return false;
  if (!visit.template operator()<WholePhase::kNorms>(0)) return false;
  if constexpr (Rule::kHasProducts) {
    if (!visit.template operator()<WholePhase::kScale>(0)) return false;
    for (uint32_t round = 0; round < rounds; ++round) {
      if (!visit.template operator()<WholePhase::kGram>(round) ||
          !visit.template operator()<WholePhase::kGramUpdate>(round) ||
          !visit.template operator()<WholePhase::kProduct>(round)) {
        return false;
      }
    }
  }
  return visit.template operator()<WholePhase::kDescent>(0);
}

// Returns visit.operator()<Rule>() with the rule of an optimizer that
// HasWholeBlocks().
template <class Visit>
decltype(auto) VisitWholeRule(OptimizerKind kind, const Visit& visit) {
  if (kind == OptimizerKind::kLamb) {
    return visit.template operator()<WholeLamb>();
  }
  if (kind == OptimizerKind::kMuon) {
    return visit.template operator()<WholeMuon>();
  }
  return visit.template operator()<WholeAdafactor>();
}

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_WHOLE_BLOCKS_H_
