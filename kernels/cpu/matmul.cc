#include "kernels/cpu/matmul.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/highway_config.h"
#include "kernels/cpu/targets.h"

// The rest of this file is compiled once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/matmul.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/bfloat16_round-inl.h"
#include "kernels/cpu/product-inl.h"

#ifndef OPTSTATE_KERNELS_CPU_MATMUL_CC_
#define OPTSTATE_KERNELS_CPU_MATMUL_CC_
namespace optstate::cpu {

// The result is made in blocks of columns. Of b 128 rows at a time are copied,
// panel after panel of 32 columns (16 KiB, half of a first-level cache): from
// one of them the inner loop reads b, from four rows of a in sequence, and
// keeps its sums in registers. 64 rows of a (32 KiB) meet all panels of a block
// while they are in the second-level cache; else a large matrix would come from
// memory for each panel.
inline constexpr size_t kPanelColumns = 32;
inline constexpr size_t kPanelDepth = 128;
inline constexpr size_t kPanelElements = kPanelColumns * kPanelDepth;
inline constexpr size_t kPanelsMax = 8;
inline constexpr size_t kBlockRows = 64;
// Rows of a at a time: with two vectors of columns eight sums in registers,
// enough to hide the latency of an addition; 16 registers hold the rest too.
inline constexpr size_t kRowsAtOnce = 4;
static_assert(kBlockRows % kRowsAtOnce == 0);

// Sums of one panel: those of the rows that there are, and of up to three more.
inline size_t PanelSums(size_t rows) {
  return (rows + kRowsAtOnce - 1) * kPanelColumns;
}

}  // namespace optstate::cpu
#endif  // OPTSTATE_KERNELS_CPU_MATMUL_CC_

HWY_BEFORE_NAMESPACE();
namespace optstate::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, kPanelColumns / 2>;

// Columns [begin, begin + count) of rows [first, first + depth) of b, the
// missing ones 0.
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

// Adds `depth` products to each of 4 rows x 2 vectors of `sums`. `a` are the
// four rows, `panel` is at the first of the columns.
HWY_INLINE void AddProducts(const float* const* a, const float* panel,
                            size_t depth, float* sums) {
  const Floats d;
  const size_t lanes = hn::Lanes(d);
  const float* const a0 = a[0];
  const float* const a1 = a[1];
  const float* const a2 = a[2];
  const float* const a3 = a[3];
  float* const sums0 = sums;
  float* const sums1 = sums0 + kPanelColumns;
  float* const sums2 = sums1 + kPanelColumns;
  float* const sums3 = sums2 + kPanelColumns;
  auto s00 = hn::LoadU(d, sums0);
  auto s01 = hn::LoadU(d, sums0 + lanes);
  auto s10 = hn::LoadU(d, sums1);
  auto s11 = hn::LoadU(d, sums1 + lanes);
  auto s20 = hn::LoadU(d, sums2);
  auto s21 = hn::LoadU(d, sums2 + lanes);
  auto s30 = hn::LoadU(d, sums3);
  auto s31 = hn::LoadU(d, sums3 + lanes);
  for (size_t k = 0; k < depth; ++k) {
    const auto b0 = hn::LoadU(d, panel);
    const auto b1 = hn::LoadU(d, panel + lanes);
    panel += kPanelColumns;
    const auto of_row0 = hn::Set(d, a0[k]);
    s00 = hn::Add(s00, Product(of_row0, b0));
    s01 = hn::Add(s01, Product(of_row0, b1));
    const auto of_row1 = hn::Set(d, a1[k]);
    s10 = hn::Add(s10, Product(of_row1, b0));
    s11 = hn::Add(s11, Product(of_row1, b1));
    const auto of_row2 = hn::Set(d, a2[k]);
    s20 = hn::Add(s20, Product(of_row2, b0));
    s21 = hn::Add(s21, Product(of_row2, b1));
    const auto of_row3 = hn::Set(d, a3[k]);
    s30 = hn::Add(s30, Product(of_row3, b0));
    s31 = hn::Add(s31, Product(of_row3, b1));
  }
  hn::StoreU(s00, d, sums0);
  hn::StoreU(s01, d, sums0 + lanes);
  hn::StoreU(s10, d, sums1);
  hn::StoreU(s11, d, sums1 + lanes);
  hn::StoreU(s20, d, sums2);
  hn::StoreU(s21, d, sums2 + lanes);
  hn::StoreU(s30, d, sums3);
  hn::StoreU(s31, d, sums3 + lanes);
}

// Adds the products with one packed panel to the sums of rows [begin, end).
void AddPanel(const MatMul& matmul, size_t begin, size_t end, size_t first,
              size_t depth, const float* panel, float* sums) {
  const Floats d;
  for (size_t i = begin; i < end; i += kRowsAtOnce) {
    // Behind the last row it is multiplied again, for sums that nobody reads.
    const float* a[kRowsAtOnce];
    for (size_t r = 0; r < kRowsAtOnce; ++r) {
      a[r] = matmul.a + std::min(i + r, end - 1) * matmul.depth + first;
    }
    for (size_t j = 0; j < kPanelColumns; j += 2 * hn::Lanes(d)) {
      AddProducts(a, panel + j, depth, sums + i * kPanelColumns + j);
    }
  }
}

// Of `count` elements of one row; sums has kPanelColumns, addend may be null.
void Finish(const MatMul& matmul, const float* sums, const float* addend,
            size_t count, float* result) {
  const Floats d;
  HWY_ALIGN float row[kPanelColumns] = {};
  if (addend != nullptr) std::memcpy(row, addend, count * sizeof(float));
  for (size_t j = 0; j < kPanelColumns; j += hn::Lanes(d)) {
    auto sum = Product(hn::Set(d, matmul.alpha), hn::LoadU(d, sums + j));
    if (addend != nullptr) {
      sum =
          hn::Add(sum, Product(hn::Set(d, matmul.beta), hn::LoadU(d, row + j)));
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
  // Of a symmetric product the part above the diagonal, and what is below it in
  // the same panel.
  panel.rows = matmul.is_symmetric ? panel.begin + panel.columns : matmul.rows;
  const size_t place = index % kPanelsMax;
  panel.packed = matmul.workspace + place * kPanelElements;
  panel.sums = matmul.workspace + kPanelsMax * kPanelElements +
               place * PanelSums(matmul.rows);
  return panel;
}

// Columns of panels [begin, end), at most kPanelsMax.
void MultiplyBlock(const MatMul& matmul, size_t begin, size_t end) {
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
    for (size_t i = 0; i < matmul.rows; i += kBlockRows) {
      for (size_t p = begin; p < end; ++p) {
        const Panel panel = PanelOf(matmul, p);
        AddPanel(matmul, i, std::min(i + kBlockRows, panel.rows), first, depth,
                 panel.packed, panel.sums);
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
}  // namespace optstate::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "kernels/cpu/target_table.h"

namespace optstate::cpu {
namespace {

constexpr auto kMultiply = OPTSTATE_TARGET_TABLE(Multiply);

}  // namespace

size_t MatMulWorkspaceElements(size_t rows) {
  return kPanelsMax * (kPanelElements + PanelSums(rows));
}

void MultiplyOn(Target target, const MatMul& matmul) {
  kMultiply.For(target)(matmul);
}

}  // namespace optstate::cpu

#endif  // HWY_ONCE
