#ifndef OPTSTATE_SERVER_SESSION_COMMIT_CONTENT_H_
#define OPTSTATE_SERVER_SESSION_COMMIT_CONTENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/hyperparams.h"
#include "server/session/job.h"

namespace optstate {

// INVALID_ARGUMENT: not one entry per group, a hyperparameter that torch would
// refuse (names the group), grad_scale not finite and positive, max_norm not
// finite or negative.
absl::Status CheckContent(const CommitSpec& spec, size_t group_count);

// Identifies what a commit asks for: hyperparameters, grad_scale and max_norm,
// to the bit. Not found_inf, in which ranks may differ. Persisted with the
// step, so its definition is part of the format: 64-bit FNV-1a over, little
// endian, per group lr, beta1, beta2, eps, weight_decay (doubles) and maximize
// (one byte), then grad_scale and max_norm.
uint64_t DigestOf(const CommitSpec& spec);

// OK when both ask for the same; else FAILED_PRECONDITION naming the first
// difference and the two ranks.
absl::Status CheckEqual(uint32_t rank_a, const CommitSpec& a, uint32_t rank_b,
                        const CommitSpec& b);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_COMMIT_CONTENT_H_
