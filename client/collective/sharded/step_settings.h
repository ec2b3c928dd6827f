#ifndef OPTSTATE_CLIENT_COLLECTIVE_SHARDED_STEP_SETTINGS_H_
#define OPTSTATE_CLIENT_COLLECTIVE_SHARDED_STEP_SETTINGS_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "client/collective/sharded/gradient_norm.h"
#include "client/session_types.h"

namespace optstate::client {

// Settings of a step that ranks of several nodes look at by themselves, because
// no daemon does it for all of them.

// Returns the norm that CommitOptions::norm_type names; nullopt: it is none.
std::optional<NormType> NormTypeOf(double norm_type);

// Returns the coefficient of torch.nn.utils.clip_grad_norm_, as the daemon has
// it; max_norm 0 does not clip.
double ClipCoefficient(double max_norm, double norm);

// Returns what identifies the settings, found_inf aside.
uint64_t SettingsDigest(const CommitOptions& commit);

// Checks what daemons would refuse later, when other ranks already wait, and
// what they are not told. `is_split`: there are several nodes.
// INVALID_ARGUMENT; UNIMPLEMENTED: groups are clipped by norms of their own.
absl::Status CheckSettings(const CommitOptions& commit, size_t group_count,
                           bool is_split);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SHARDED_STEP_SETTINGS_H_
