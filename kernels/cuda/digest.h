#ifndef OPTSTATE_KERNELS_CUDA_DIGEST_H_
#define OPTSTATE_KERNELS_CUDA_DIGEST_H_

#include <cstddef>
#include <cstdint>

#include "kernels/ops/host_device.h"

namespace optstate::kernels::cuda {

// A digest says whether two places have the same bytes: it finds stale, torn
// and misplaced copies, and is no defence against who wants it to be equal. It
// is made of two exact sums over words of 32 bits, the second one weighted by
// the place of the word, so that the order of additions is any.
// kernels/cpu/digest.h has the host's.

// The work of one block of threads in a launch over many arrays. The address is
// the device's, and aligned to 4 bytes.
struct DigestTask {
  const void* data;
  uint64_t bytes;
};

// The threads of a block: kBlockThreads of block_kernels.h.
inline constexpr uint32_t kDigestThreads = 256;

// Memory that the threads of a block share.
struct DigestShared {
  uint64_t sums[kDigestThreads];
  uint64_t weighted[kDigestThreads];
};

OPTSTATE_HOST_DEVICE inline uint64_t DigestOfSums(uint64_t sum,
                                                  uint64_t weighted) {
  // The odd factor spreads the sum over all bits.
  return sum * uint64_t{0x9E3779B97F4A7C15} + weighted;
}

// Returns word i of an array, little endian; behind its end are zeros.
OPTSTATE_HOST_DEVICE inline uint64_t DigestWord(const DigestTask& task,
                                                uint64_t i) {
  if ((i + 1) * sizeof(uint32_t) <= task.bytes) {
    return static_cast<const uint32_t*>(task.data)[i];
  }
  const auto* const bytes = static_cast<const uint8_t*>(task.data);
  uint64_t word = 0;
  for (uint64_t at = i * sizeof(uint32_t), shift = 0; at < task.bytes;
       ++at, shift += 8) {
    word |= static_cast<uint64_t>(bytes[at]) << shift;
  }
  return word;
}

// Computes the digest of an array by the threads of a block, which is one of
// block_kernels.h.
template <class Block>
OPTSTATE_HOST_DEVICE void DigestArray(const Block& block,
                                      const DigestTask& task, uint64_t* digest,
                                      DigestShared* shared) {
  const uint64_t words = (task.bytes + sizeof(uint32_t) - 1) / sizeof(uint32_t);
  block.Run([&](uint32_t t) {
    uint64_t sum = 0;
    uint64_t weighted = 0;
    for (uint64_t i = t; i < words; i += kDigestThreads) {
      const uint64_t word = DigestWord(task, i);
      sum += word;
      weighted += (i + 1) * word;
    }
    shared->sums[t] = sum;
    shared->weighted[t] = weighted;
  });
  block.Run([&](uint32_t t) {
    if (t != 0) return;
    uint64_t sum = 0;
    uint64_t weighted = 0;
    for (uint32_t k = 0; k < kDigestThreads; ++k) {
      sum += shared->sums[k];
      weighted += shared->weighted[k];
    }
    *digest = DigestOfSums(sum, weighted);
  });
}

}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_KERNELS_CUDA_DIGEST_H_
