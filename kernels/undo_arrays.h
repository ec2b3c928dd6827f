#ifndef OPTSTATE_KERNELS_UNDO_ARRAYS_H_
#define OPTSTATE_KERNELS_UNDO_ARRAYS_H_

#include <sys/prctl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/cpu/targets.h"
#include "kernels/split_master.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

// The arrays that tests have killed kernels update.
namespace optstate::kernels {

inline bool HasState(const UpdateKernelKey& key, int k) {
  return HasStateArray(InfoOf(key.optimizer), k, key.options);
}

inline bool IsSplit(const UpdateKernelKey& key) {
  return key.master == MasterFormat::kSplit;
}

inline size_t MasterBytes(const UpdateKernelKey& key) {
  return IsSplit(key) ? 2 : 4;
}

inline size_t StateBytes(StateFormat format) {
  return format == StateFormat::kFloat32    ? 4
         : format == StateFormat::kBFloat16 ? 2
                                            : 1;
}

// The memory that a kernel writes besides its slot.
template <size_t kNumel>
struct UndoArrays {
  static constexpr int kArrays = 1 + kStateArraysMax;
  static constexpr size_t kBlocks =
      (kNumel + kQuantizedBlockElements - 1) / kQuantizedBlockElements;

  float array[kArrays][kNumel];           // master and state, or the sum alone
  float scale[kStateArraysMax][kBlocks];  // of state that is of bytes
  uint32_t parameter[kNumel];             // enough for every dtype

  bool operator==(const UndoArrays& other) const {
    return std::memcmp(this, &other, sizeof(*this)) == 0;
  }

  // Returns a view of the arrays that `key` has.
  TileView View(const UpdateKernelKey& key, size_t numel) {
    TileView view;
    view.parameter = parameter;
    view.master = array[0];  // the low halves of a split master
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (HasState(key, k)) view.state[k] = array[1 + k];
      view.scale[k] = scale[k];
    }
    view.numel = numel;
    return view;
  }

  // Fills all arrays with floats that every rule changes.
  void Fill(std::mt19937* random) {
    std::uniform_real_distribution<float> values(0.5f, 1.5f);
    for (size_t i = 0; i < kNumel; ++i) {
      for (auto& its : array) its[i] = values(*random);
      // The values suit each rule: exp_avg_sq grows and max_exp_avg_sq follows
      // it; grad_avg, in the same place, is less than the root of square_avg.
      array[3][i] = 0.25f;
      parameter[i] = 0xA5A5A5A5;
    }
    for (auto& its : scale) {
      for (float& x : its) x = 1;
    }
  }

  // Splits the masters, which are floats so far.
  void Split() {
    const std::vector<float> masters(array[0], array[0] + kNumel);
    SplitMaster(masters.data(), reinterpret_cast<uint16_t*>(parameter),
                reinterpret_cast<uint16_t*>(array[0]), kNumel);
  }
};

// Returns the elements in a vector; 16 cuts those of unnamed targets somewhere
// too.
inline size_t LanesOf(cpu::Target target) {
  const absl::string_view name = cpu::TargetName(target);
#if defined(PR_SVE_GET_VL) && defined(__aarch64__)
  if (name == "SVE") {
    // The machine and the kernel choose the length.
    const auto vl = static_cast<size_t>(prctl(PR_SVE_GET_VL));
    return (vl & PR_SVE_VL_LEN_MASK) / sizeof(float);
  }
#endif
  if (name == "AVX2") return 8;
  if (name == "SSE4" || name == "NEON") return 4;
  return name == "SCALAR" ? 1 : 16;
}

// Returns whether pairs fit: SVE may have vectors of which no pair fits the
// slot, and then nothing is xored.
inline bool HasPairs(cpu::Target target) {
  return 2 * LanesOf(target) <= kUndoVectorElements;
}

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_UNDO_ARRAYS_H_
