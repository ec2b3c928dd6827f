#ifndef OPTSTATE_CLIENT_FAKE_FAKE_ARITHMETIC_H_
#define OPTSTATE_CLIENT_FAKE_FAKE_ARITHMETIC_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/session_types.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::client {

// Access to element `index` of an array of `dtype`. StoreElement rounds `value`
// to nearest, ties to even.
float LoadElement(DType dtype, const std::byte* data, uint64_t index);
void StoreElement(DType dtype, std::byte* data, uint64_t index, float value);

// The state of one parameter.
struct FakeState {
  std::vector<float> master;
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  std::vector<float> max_exp_avg_sq;
  int64_t step_count = 0;
};

// Takes one step of Adam or AdamW, an element at a time in float, in torch's
// order of operations (kernels/README.md says which roundings). There is no
// fused multiply-add, so the bits are those of the real kernels.
void FakeUpdate(OptimizerKind optimizer, bool amsgrad,
                const Hyperparams& hyperparams, double gradient_factor,
                const std::vector<float>& gradient, FakeState* state);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_FAKE_FAKE_ARITHMETIC_H_
