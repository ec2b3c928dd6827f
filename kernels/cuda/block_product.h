#ifndef OPTSTATE_KERNELS_CUDA_BLOCK_PRODUCT_H_
#define OPTSTATE_KERNELS_CUDA_BLOCK_PRODUCT_H_

#include <cstdint>

#include "kernels/cuda/block_kernels.h"
#include "kernels/ops/host_device.h"
// This include comes after scalar_ops.h.
#include "kernels/ops/float16-inl.h"

namespace optstate::kernels::cuda {

// A product of matrices by many blocks of threads, as cpu/matmul.h defines it:
// result = alpha * (a @ b) + beta * addend, rounded to bfloat16. Every element
// of the product is one float to which the products of its row and column are
// added from the first to the last, each rounded before.
struct BlockProduct {
  uint64_t rows;     // of a and the result
  uint64_t columns;  // of b and the result
  uint64_t depth;
  const float* a;
  const float* b;
  bool b_is_transposed;  // b is given as its transpose: columns x depth
  // The product equals its transpose, bit by bit: half of it is copied.
  bool is_symmetric;
  float alpha;
  float beta;
  const float* addend;  // null: none
  float* result;        // overlaps no other
};

// The result is made in tiles, of which a thread has a few rows and columns. A
// few columns of a and rows of b are brought to all threads at a time.
inline constexpr uint32_t kProductTile = 64;
inline constexpr uint32_t kProductDepth = 16;
inline constexpr uint32_t kThreadTile = 4;
static_assert(kProductTile / kThreadTile * (kProductTile / kThreadTile) ==
              kBlockThreads);

// Memory that the threads of a block share.
struct ProductShared {
  // The extra columns put what neighbours store into different banks.
  float a[kProductDepth][kProductTile + kThreadTile];
  float b[kProductDepth][kProductTile + kThreadTile];
};

// The sums of one thread.
struct ThreadTile {
  float sums[kThreadTile][kThreadTile];
};

// Brings columns [first, first + kProductDepth) of the rows of a, and rows of
// the columns of b, that a tile needs. What is not there is 0.
OPTSTATE_HOST_DEVICE inline void LoadProductStrip(const BlockProduct& product,
                                                  uint64_t first_row,
                                                  uint64_t first_column,
                                                  uint64_t first, uint32_t t,
                                                  ProductShared* shared) {
  constexpr uint32_t kElements = kProductTile * kProductDepth;
  for (uint32_t e = t; e < kElements; e += kBlockThreads) {
    // Neighbours have neighbours in a row of a, and in one of b.
    const uint32_t i = e / kProductDepth;
    const uint32_t k = e % kProductDepth;
    const uint64_t row = first_row + i;
    const bool is_in_a = row < product.rows && first + k < product.depth;
    shared->a[k][i] =
        is_in_a ? product.a[row * product.depth + first + k] : 0.0f;
    const uint32_t j = product.b_is_transposed ? i : e % kProductTile;
    const uint32_t m = product.b_is_transposed ? k : e / kProductTile;
    const uint64_t column = first_column + j;
    const bool is_in_b = column < product.columns && first + m < product.depth;
    const uint64_t at = product.b_is_transposed
                            ? column * product.depth + first + m
                            : (first + m) * product.columns + column;
    shared->b[m][j] = is_in_b ? product.b[at] : 0.0f;
  }
}

// Adds the products of `depth` columns and rows, in order.
OPTSTATE_HOST_DEVICE inline void AddProducts(const ProductShared& shared,
                                             uint32_t depth, uint32_t i0,
                                             uint32_t j0, ThreadTile* tile) {
  for (uint32_t k = 0; k < depth; ++k) {
    for (uint32_t i = 0; i < kThreadTile; ++i) {
      for (uint32_t j = 0; j < kThreadTile; ++j) {
        tile->sums[i][j] = scalar::ops::Add(
            tile->sums[i][j],
            scalar::ops::Product(shared.a[k][i0 + i], shared.b[k][j0 + j]));
      }
    }
  }
}

// Stores a thread's part of the tile that begins there. `is_mirrored`: and what
// lies across the diagonal.
OPTSTATE_HOST_DEVICE inline void FinishProducts(const BlockProduct& product,
                                                uint64_t first_row,
                                                uint64_t first_column,
                                                bool is_mirrored,
                                                const ThreadTile& tile) {
  const scalar::ops::FloatTag d;
  for (uint32_t i = 0; i < kThreadTile; ++i) {
    for (uint32_t j = 0; j < kThreadTile; ++j) {
      const uint64_t row = first_row + i;
      const uint64_t column = first_column + j;
      if (row >= product.rows || column >= product.columns) continue;
      const uint64_t at = row * product.columns + column;
      float value = scalar::ops::Product(product.alpha, tile.sums[i][j]);
      if (product.addend != nullptr) {
        value = scalar::ops::Add(
            value, scalar::ops::Product(product.beta, product.addend[at]));
      }
      value = scalar::RoundToBFloat16(d, value);
      product.result[at] = value;
      if (is_mirrored) product.result[column * product.columns + row] = value;
    }
  }
}

// Computes the tiles of one of `parts` blocks.
template <class Block>
OPTSTATE_HOST_DEVICE void MultiplyTiles(const Block& block,
                                        const BlockProduct& product,
                                        uint32_t part, uint32_t parts,
                                        ProductShared* shared) {
  constexpr uint32_t kAcross = kProductTile / kThreadTile;  // threads
  const uint64_t down = (product.rows + kProductTile - 1) / kProductTile;
  const uint64_t across = (product.columns + kProductTile - 1) / kProductTile;
  typename Block::template PerThread<ThreadTile> tiles;
  for (uint64_t number = part; number < down * across; number += parts) {
    const uint64_t tile_row = number / across;
    const uint64_t tile_column = number - tile_row * across;
    if (product.is_symmetric && tile_column < tile_row) continue;
    const uint64_t first_row = tile_row * kProductTile;
    const uint64_t first_column = tile_column * kProductTile;
    block.Run([&](uint32_t t) { tiles[t] = ThreadTile{}; });
    for (uint64_t first = 0; first < product.depth; first += kProductDepth) {
      const uint64_t rest = product.depth - first;
      const auto depth = static_cast<uint32_t>(
          rest < kProductDepth ? rest : uint64_t{kProductDepth});
      block.Run([&](uint32_t t) {
        LoadProductStrip(product, first_row, first_column, first, t, shared);
      });
      block.Run([&](uint32_t t) {
        AddProducts(*shared, depth, t / kAcross * kThreadTile,
                    t % kAcross * kThreadTile, &tiles[t]);
      });
    }
    block.Run([&](uint32_t t) {
      FinishProducts(product, first_row + t / kAcross * kThreadTile,
                     first_column + t % kAcross * kThreadTile,
                     product.is_symmetric && tile_column != tile_row, tiles[t]);
    });
  }
}

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_BLOCK_PRODUCT_H_
