#ifndef OPTSTATE_SERVER_SESSION_STEPS_COMMIT_CONTENT_H_
#define OPTSTATE_SERVER_SESSION_STEPS_COMMIT_CONTENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/optimizer.h"
#include "server/session/job_types.h"

namespace optstate::session {

// Returns the first of the groups that share the clipping norm of `group`.
uint32_t FirstOfClipped(const CommitSpec& spec, uint32_t group);

// Returns INVALID_ARGUMENT for: not one entry per group, a hyperparameter that
// torch would refuse (names the group), grad_scale non-finite or not positive,
// max_norm or max_value non-finite or negative, norm_type neither 1, 2 nor
// infinity, bad clips_with.
absl::Status CheckContent(const CommitSpec& spec, OptimizerKind optimizer,
                          size_t group_count);

// Returns a digest of the content of a commit, hyperparameters included, to the
// bit; found_inf is left out because ranks may differ in it. The digest is
// persisted with the step, so its definition is part of the format: 64-bit
// FNV-1a over, little endian, per group the kHyperparamsMax hyperparameters and
// max_norm, then grad_scale, max_norm, max_value and norm_type, and for each
// group that is clipped with an earlier one the numbers of both groups, all
// doubles.
uint64_t DigestOf(const CommitSpec& spec);

// Returns what identifies a step that is prepared with this commit: equal on
// nodes that prepare the same. 64-bit FNV-1a over the step, DigestOf(), the
// layout's hash, the number of finished loads and, in the layout's order, each
// parameter's norm (-1: it is not updated; any NaN is one). Never 0.
uint64_t PreparedDigest(const CommitSpec& spec, absl::string_view layout_hash,
                        uint32_t loads_finished,
                        absl::Span<const double> gradient_norms);

// Returns whether both commits ask for the same, to the bit, but for the step
// and found_inf. Both are of one job.
bool AsksForTheSame(const CommitSpec& a, const CommitSpec& b);

// Returns OK when both commits ask for the same; else FAILED_PRECONDITION
// naming the first difference and the two ranks.
absl::Status CheckEqual(OptimizerKind optimizer, uint32_t rank_a,
                        const CommitSpec& a, uint32_t rank_b,
                        const CommitSpec& b);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_COMMIT_CONTENT_H_
