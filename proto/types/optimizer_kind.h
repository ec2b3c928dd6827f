#ifndef OPTSTATE_PROTO_TYPES_OPTIMIZER_KIND_H_
#define OPTSTATE_PROTO_TYPES_OPTIMIZER_KIND_H_

#include <cstdint>

namespace optstate {

// Values are part of the wire and file formats (optstate.v1.OptimizerKind).
enum class OptimizerKind : uint8_t {
  kAdam = 1,   // weight decay added to the gradient (L2)
  kAdamW = 2,  // decoupled weight decay
};

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_OPTIMIZER_KIND_H_
