#ifndef OPTSTATE_PROTO_TYPES_STEP_COMMIT_H_
#define OPTSTATE_PROTO_TYPES_STEP_COMMIT_H_

#include <cstdint>

#include "proto/types/optimizer.h"

namespace optstate {

// The settings with which a rank commits a step. Every rank commits with equal
// content, found_inf aside. The two arrays are owned by a script that commits
// (a vector), and are borrowed where a commit is received (a span), because
// that allocates nothing.
template <typename GroupArray, typename ClipArray>
struct StepCommit {
  uint64_t step = 0;  // committed_step + 1
  GroupArray groups;  // Hyperparams, one per group of the layout
  // The clipping group of each group, see v1::GroupHyperparams; empty: each
  // group is clipped alone.
  ClipArray clips_with;    // uint32_t
  double grad_scale = 1;   // gradients are divided by it
  double max_norm = 0;     // of all gradients together; 0: no clipping
  double max_value = 0;    // of each gradient; 0: no clipping
  double norm_type = 2;    // of max_norm: 1, 2 or infinity
  bool found_inf = false;  // this rank found non-finite values: skip
  bool two_phase = false;  // prepare the step; a verdict takes it
  // The prepared step is committed only once the norm of all nodes is noted.
  bool awaits_norm = false;
};

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_STEP_COMMIT_H_
