#ifndef OPTSTATE_PROTO_TYPES_LAYOUT_HASH_H_
#define OPTSTATE_PROTO_TYPES_LAYOUT_HASH_H_

#include <string>

#include "absl/status/statusor.h"
#include "proto/types/layout.h"

namespace optstate {

// Returns the SHA-256 (32 bytes) of the canonical serialisation of a layout.
// The serialisation is part of the format: after a change of it every stored
// job refuses its ranks.
//
//   "optstate.layout.3"  state format  master format  optimizer
//   group count, then the options of each group
//   parameter count, then of each parameter:
//     name bytes  name  dimensions  each dimension  dtype  gradient dtype
//     group
//   only of shards: of each parameter, in order:
//     owner  each dimension of the global shape  of each dimension the offset
//
// Numbers are uint64, little endian. numel is left out because it is the
// product of the dimensions.
absl::StatusOr<std::string> LayoutHash(const LayoutSpec& spec);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_LAYOUT_HASH_H_
