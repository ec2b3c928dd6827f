#include "kernels/cpu/matmul.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul.cc"
#include "hwy/foreach_target.h"
// This include comes after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/ops/float16-inl.h"
#include "kernels/ops/ops-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_MATMUL_CC_
#define OPTSTATE_KERNELS_CPU_MATMUL_CC_
namespace optstate::kernels::cpu {

// The result is made in blocks of columns. From b 128 rows at a time are
// copied, panel after panel of 32 columns (16 KiB, half of a first-level
// cache): from one of them the inner loop reads b, from some rows of a in
// sequence, and keeps its sums in registers. 60 rows of a (30 KiB) meet all
// panels of a block while they are in the second-level cache; else a large
// matrix would come from memory for each panel.
inline constexpr size_t kPanelColumns = 32;
inline constexpr size_t kPanelDepth = 128;
inline constexpr size_t kPanelElements = kPanelColumns * kPanelDepth;
inline constexpr size_t kPanelsMax = 8;
inline constexpr size_t kBlockRows = 60;
// The stride of a's rows in a block, which are copied too: where they lie a
// multiple of 4 KiB apart, twelve of them would not fit a cache of eight ways.
inline constexpr size_t kRowStride = kPanelDepth + 16;
// The rows of a at a time, where there are fewer than a target likes best.
inline constexpr size_t kLastRows = 4;

// Returns the number of sums of one panel: those of the rows that there are,
// and of up to three more.
inline size_t PanelSums(size_t rows) {
  return (rows + kLastRows - 1) * kPanelColumns;
}

}  // namespace optstate::kernels::cpu
#endif  // OPTSTATE_KERNELS_CPU_MATMUL_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, kPanelColumns / 2>;

// Copies columns [begin, begin + count) of rows [first, first + depth) of b,
// the missing ones 0.
void Pack(const MatMul& matmul, size_t begin, size_t count, size_t first,
          size_t depth, float* panel) {
  if (matmul.b_is_transposed) {
    for (size_t j = 0; j < count; ++j) {
      const float* column = matmul.b + (begin + j) * matmul.depth + first;
      for (size_t k = 0; k < depth; ++k) {
        panel[k * kPanelColumns + j] = column[k];
      }
    }
    if (count == kPanelColumns) return;
    for (size_t k = 0; k < depth; ++k) {
      std::fill_n(panel + k * kPanelColumns + count, kPanelColumns - count,
                  0.0f);
    }
    return;
  }
  for (size_t k = 0; k < depth; ++k) {
    float* to = panel + k * kPanelColumns;
    std::memcpy(to, matmul.b + (first + k) * matmul.columns + begin,
                count * sizeof(float));
    std::fill_n(to + count, kPanelColumns - count, 0.0f);
  }
}

// The rows of a at a time, and the vectors of columns: twelve sums hide the
// latency of an addition, and 16 registers hold them, two vectors of b, a
// number of a and a product. AVX-512 multiplies by a number in memory at no
// cost, but only where that is used once; loading it first takes a unit that
// multiplies or adds. So there one vector is faster.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
constexpr size_t kRowsAtOnce = 12;
constexpr size_t kVectorsAtOnce = 1;
#else
constexpr size_t kRowsAtOnce = 6;
constexpr size_t kVectorsAtOnce = 2;
#endif
static_assert(kBlockRows % kRowsAtOnce == 0);

template <bool kIsFirst, class V>
HWY_INLINE V FirstOrSecond(V first, V second) {
  if constexpr (kIsFirst) return first;
  return second;
}

// Adds to sums, of which k is of row k / kVectors and vector k % kVectors. Each
// is a parameter, for vectors of SVE cannot be elements of an array.
template <size_t kVectors, size_t... k, class... V>
HWY_INLINE void AddInRegisters(std::index_sequence<k...>, const float* const* a,
                               const float* panel, size_t depth, float* to,
                               V... sums) {
  static_assert(kVectors == 1 || kVectors == 2);
  const Floats d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < depth; ++i) {
    const auto b0 = hn::LoadU(d, panel);
    const auto b1 = hn::LoadU(d, panel + (kVectors - 1) * lanes);
    panel += kPanelColumns;
    ((sums = hn::Add(sums,
                     ops::Product(hn::Set(d, a[k / kVectors][i]),
                                  FirstOrSecond<k % kVectors == 0>(b0, b1)))),
     ...);
  }
  (hn::StoreU(sums, d,
              to + k / kVectors * kPanelColumns + k % kVectors * lanes),
   ...);
}

// Adds `depth` products to each of these sums. `a` are the rows, `panel` is at
// the first of the columns.
template <size_t kVectors, size_t... k>
HWY_INLINE void AddProducts(std::index_sequence<k...> all,
                            const float* const* a, const float* panel,
                            size_t depth, float* sums) {
  const Floats d;
  const size_t lanes = hn::Lanes(d);
  AddInRegisters<kVectors>(all, a, panel, depth, sums,
                           hn::LoadU(d, sums + k / kVectors * kPanelColumns +
                                            k % kVectors * lanes)...);
}

// Adds the rows from `begin` on, which are fewer when `begin` is close to
// `end`: in place of missing rows the last one is multiplied again, for sums
// that are not read.
template <size_t kRows, size_t kVectors>
HWY_INLINE void AddRows(const float* a, size_t begin, size_t end, size_t depth,
                        const float* panel, float* sums) {
  const float* rows[kRows];
  for (size_t r = 0; r < kRows; ++r) {
    rows[r] = a + std::min(begin + r, end - 1) * kRowStride;
  }
  for (size_t j = 0; j < kPanelColumns; j += kVectors * hn::Lanes(Floats())) {
    AddProducts<kVectors>(std::make_index_sequence<kRows * kVectors>(), rows,
                          panel + j, depth, sums + begin * kPanelColumns + j);
  }
}

// Adds the products of `count` copied rows with one packed panel.
void AddPanel(const float* a, size_t count, size_t depth, const float* panel,
              float* sums) {
  size_t i = 0;
  for (; i + kRowsAtOnce <= count; i += kRowsAtOnce) {
    AddRows<kRowsAtOnce, kVectorsAtOnce>(a, i, count, depth, panel, sums);
  }
  for (; i < count; i += kLastRows) {
    AddRows<kLastRows, 2>(a, i, count, depth, panel, sums);
  }
}

// Finishes `count` elements of one row; sums has kPanelColumns, addend may be
// null.
void Finish(const MatMul& matmul, const float* sums, const float* addend,
            size_t count, float* result) {
  const Floats d;
  HWY_ALIGN float row[kPanelColumns] = {};
  if (addend != nullptr) std::memcpy(row, addend, count * sizeof(float));
  for (size_t j = 0; j < kPanelColumns; j += hn::Lanes(d)) {
    auto sum = ops::Product(hn::Set(d, matmul.alpha), hn::LoadU(d, sums + j));
    if (addend != nullptr) {
      sum = hn::Add(
          sum, ops::Product(hn::Set(d, matmul.beta), hn::LoadU(d, row + j)));
    }
    hn::StoreU(RoundToBFloat16(d, sum), d, row + j);
  }
  std::memcpy(result, row, count * sizeof(float));
}

// A panel of the result.
struct Panel {
  size_t begin;  // column
  size_t columns;
  size_t rows;  // to be computed
  float* packed;
  float* sums;
};

Panel PanelOf(const MatMul& matmul, size_t index) {
  Panel panel;
  panel.begin = index * kPanelColumns;
  panel.columns = std::min(kPanelColumns, matmul.columns - panel.begin);
  // A symmetric product is computed above the diagonal, and below it in the
  // same panel.
  panel.rows = matmul.is_symmetric ? panel.begin + panel.columns : matmul.rows;
  const size_t place = index % kPanelsMax;
  panel.packed = matmul.workspace + place * kPanelElements;
  panel.sums = matmul.workspace + kPanelsMax * kPanelElements +
               kBlockRows * kRowStride + place * PanelSums(matmul.rows);
  return panel;
}

// Computes the columns of panels [begin, end), at most kPanelsMax.
void MultiplyBlock(const MatMul& matmul, size_t begin, size_t end) {
  float* const a = matmul.workspace + kPanelsMax * kPanelElements;
  for (size_t p = begin; p < end; ++p) {
    const Panel panel = PanelOf(matmul, p);
    std::fill_n(panel.sums, PanelSums(panel.rows), 0.0f);
  }
  for (size_t first = 0; first < matmul.depth; first += kPanelDepth) {
    const size_t depth = std::min(kPanelDepth, matmul.depth - first);
    for (size_t p = begin; p < end; ++p) {
      const Panel panel = PanelOf(matmul, p);
      Pack(matmul, panel.begin, panel.columns, first, depth, panel.packed);
    }
    const size_t rows = PanelOf(matmul, end - 1).rows;  // no other has more
    for (size_t i = 0; i < rows; i += kBlockRows) {
      for (size_t r = i; r < std::min(i + kBlockRows, rows); ++r) {
        std::memcpy(a + (r - i) * kRowStride,
                    matmul.a + r * matmul.depth + first, depth * sizeof(float));
      }
      for (size_t p = begin; p < end; ++p) {
        const Panel panel = PanelOf(matmul, p);
        if (i >= panel.rows) continue;
        AddPanel(a, std::min(kBlockRows, panel.rows - i), depth, panel.packed,
                 panel.sums + i * kPanelColumns);
      }
    }
  }
  for (size_t p = begin; p < end; ++p) {
    const Panel panel = PanelOf(matmul, p);
    for (size_t i = 0; i < panel.rows; ++i) {
      const size_t at = i * matmul.columns + panel.begin;
      Finish(matmul, panel.sums + i * kPanelColumns,
             matmul.addend == nullptr ? nullptr : matmul.addend + at,
             panel.columns, matmul.result + at);
    }
  }
}

void Multiply(const MatMul& matmul) {
  const size_t panels = (matmul.columns + kPanelColumns - 1) / kPanelColumns;
  for (size_t p = 0; p < panels; p += kPanelsMax) {
    MultiplyBlock(matmul, p, std::min(p + kPanelsMax, panels));
  }
  if (!matmul.is_symmetric) return;
  for (size_t i = 1; i < matmul.rows; ++i) {
    for (size_t j = 0; j < i - i % kPanelColumns; ++j) {
      matmul.result[i * matmul.columns + j] =
          matmul.result[j * matmul.columns + i];
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace optstate::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::kernels::cpu {
namespace {

constexpr auto kMultiply = OPTSTATE_TARGET_TABLE(Multiply);

}  // namespace

size_t MatMulWorkspaceElements(size_t rows) {
  return kPanelsMax * (kPanelElements + PanelSums(rows)) +
         kBlockRows * kRowStride;
}

void MultiplyOn(Target target, const MatMul& matmul) {
  kMultiply.For(target)(matmul);
}

}  // namespace optstate::kernels::cpu

#endif  // HWY_ONCE
