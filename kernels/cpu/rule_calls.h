#ifndef OPTSTATE_KERNELS_CPU_RULE_CALLS_H_
#define OPTSTATE_KERNELS_CPU_RULE_CALLS_H_

// Test helpers that call a rule's kernel on guarded arrays, and show what it
// wrote.

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/guarded_array.h"
#include "kernels/cpu/targets.h"
#include "kernels/test_keys.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"

namespace optstate::kernels::cpu {

// Returns the target without SIMD, which all others are to be equal to.
Target PlainTarget();

// Returns every pair of dtypes, and with each of the other state formats two
// dtypes that differ.
std::vector<UpdateKernelKey> AllKeys();

Variant VariantOf(const UpdateKernelKey& key);
bool IsSplit(const UpdateKernelKey& key);
std::string NameOfKey(const UpdateKernelKey& key);

// One element as the kernel reads it; each part as the bits of its dtype.
struct Element {
  float gradient = 0;
  float master = 0;
  float state[kStateArraysMax] = {};
};

// The values that a kernel wrote.
struct Result {
  std::vector<uint32_t> master;
  std::vector<uint32_t> state[kStateArraysMax];
  std::vector<uint32_t> scale[kStateArraysMax];
  std::vector<uint32_t> parameter;

  bool operator==(const Result& other) const = default;
};

std::vector<uint16_t> HalvesOf(DType dtype, const std::vector<float>& floats);

// One state array in a key's format; the arrays of the others are empty.
class StateArray {
 public:
  StateArray(StateFormat format, bool is_never_negative,
             const std::vector<float>& values, size_t shift);

  // Returns the address of the elements from `begin` on.
  void* data(size_t begin) {
    if (format_ == StateFormat::kFloat32) return floats_.data() + begin;
    if (format_ == StateFormat::kBFloat16) return halves_.data() + begin;
    return codes_.data() + begin;
  }
  float* scale(size_t begin) {
    return scale_.data() + begin / kQuantizedBlockElements;
  }

  // Returns the floats of an array that is not of bytes.
  std::vector<float> values() const;
  std::vector<uint32_t> bits() const;
  std::vector<uint32_t> scale_bits() const;

  bool GuardsAreIntact() const {
    return floats_.GuardsAreIntact() && halves_.GuardsAreIntact() &&
           codes_.GuardsAreIntact() && scale_.GuardsAreIntact();
  }

 private:
  const StateFormat format_;
  GuardedArray<float> floats_;
  GuardedArray<uint16_t> halves_;
  GuardedArray<uint8_t> codes_;
  GuardedArray<float> scale_;
};

// The way a kernel is called.
struct Call {
  Target target;
  bool with_undo = false;
  // The view is cut here, into two calls.
  size_t cut = 0;
  uint64_t flat_begin = 0;
  // If not null, is called instead of the target's kernel. It knows no undo.
  bool (*apply)(const UpdateKernelKey& key, const UpdateFactors& factors,
                const TileView& view) = nullptr;
};

// Several gradients of dtype `Gradient`, each with as many elements.
template <typename Gradient>
using Gradients = std::vector<std::vector<Gradient>>;

// Applies `gradients`, each rounded to the key's dtype.
Result ApplySum(const UpdateKernelKey& key, const UpdateFactors& factors,
                const std::vector<Element>& elements,
                const Gradients<float>& gradients, const Call& call);

Result Apply(const Call& call, const UpdateKernelKey& key,
             const UpdateFactors& factors,
             const std::vector<Element>& elements);

Result ApplyPlainly(const UpdateKernelKey& key, const UpdateFactors& factors,
                    const std::vector<Element>& elements);

UpdateFactors Factors(const UpdateKernelKey& key,
                      const Hyperparams& hyperparams, int64_t step_count = 7,
                      double gradient_limit = 0);

// Returns the factors of the second of the settings that the key's tests have.
UpdateFactors FirstFactors(const UpdateKernelKey& key);

float RandomNormal(std::mt19937* random);

// Returns mostly what training sees; one in four are random bits: NaN,
// infinities, denormals, huge values.
Element RandomElement(std::mt19937* random);

std::vector<Element> RandomElements(size_t numel, std::mt19937* random);

}  // namespace optstate::kernels::cpu

#endif  // OPTSTATE_KERNELS_CPU_RULE_CALLS_H_
