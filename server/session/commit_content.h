#ifndef OPTSTATE_SERVER_SESSION_COMMIT_CONTENT_H_
#define OPTSTATE_SERVER_SESSION_COMMIT_CONTENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/optimizer.h"
#include "server/session/job.h"

namespace optstate {

// The first of the groups that are clipped by one norm, of which `group` is.
uint32_t FirstOfClipped(const CommitSpec& spec, uint32_t group);

// INVALID_ARGUMENT: not one entry per group, a hyperparameter that torch would
// refuse (names the group), grad_scale not finite and positive, max_norm or
// max_value not finite or negative, norm_type neither 1, 2 nor infinity, bad
// clips_with.
absl::Status CheckContent(const CommitSpec& spec, OptimizerKind optimizer,
                          size_t group_count);

// Identifies what a commit asks for, hyperparameters and all, to the bit. Not
// found_inf, in which ranks may differ. Persisted with the step, so its
// definition is part of the format: 64-bit FNV-1a over, little endian, per
// group the kHyperparamsMax hyperparameters and max_norm, then grad_scale,
// max_norm, max_value and norm_type, and of each group that is clipped with an
// earlier one the numbers of both, all doubles.
uint64_t DigestOf(const CommitSpec& spec);

// OK when both ask for the same; else FAILED_PRECONDITION naming the first
// difference and the two ranks.
absl::Status CheckEqual(OptimizerKind optimizer, uint32_t rank_a,
                        const CommitSpec& a, uint32_t rank_b,
                        const CommitSpec& b);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_COMMIT_CONTENT_H_
