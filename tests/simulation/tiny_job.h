#ifndef OPTSTATE_TESTS_SIMULATION_TINY_JOB_H_
#define OPTSTATE_TESTS_SIMULATION_TINY_JOB_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "optstate/v1/config.pb.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "server/session/job.h"
#include "server/session/job_types.h"

namespace optstate::simulation {

// The job that every node of a simulation has: AdamW on a few KiB of float32
// parameters, replicated over the nodes and shared out among the ranks of a
// node. Its masters, gradients and hyperparameters follow from the step.
//
// Threads: one at a time.
class TinyJob {
 public:
  static constexpr char kName[] = "simulated";
  static constexpr uint32_t kParameters = 16;
  static constexpr uint32_t kElements = 48;  // of each parameter

  explicit TinyJob(uint32_t ranks);

  uint32_t ranks() const { return ranks_; }
  const Layout& layout() const { return layout_; }
  session::RegisterSpec RegisterSpecOf(uint32_t rank, uint32_t node,
                                       bool comes_back) const;
  // Returns the configuration of a node's daemon whose state is in `state_dir`.
  v1::DaemonConfig ConfigOf(const std::string& state_dir) const;

  // Returns the values of all parameters, one behind the other, of the initial
  // masters (step 0) or the gradients of a step. Valid until the next call.
  absl::Span<const float> ValuesOf(uint64_t step);
  static absl::Span<const float> OfParameter(absl::Span<const float> values,
                                             uint32_t parameter) {
    return values.subspan(size_t{parameter} * kElements, kElements);
  }

  // Returns the commit of a step; valid until the next call.
  session::CommitSpec CommitOf(uint64_t step, bool two_phase, bool found_inf);
  // Returns whether some rank finds Inf in the step, so that all nodes skip it.
  static bool IsSkipped(uint64_t step) { return step % 5 == 3; }
  // Returns the number of steps up to this one that are not skipped.
  static uint64_t AppliedUpTo(uint64_t step);

  // Loads the masters of these pieces as a rank that has begun to load.
  absl::Status LoadMasters(session::Job* job, uint32_t rank,
                           const std::vector<Piece>& pieces);

  // Returns a hash of the job's masters, state arrays and step counts.
  // INTERNAL: a parameter's step count is not the number of applied steps, so
  // that a step was applied twice or not at all.
  absl::StatusOr<uint64_t> DigestOf(session::Job* job, uint64_t step) const;

  // Returns the digest that the job has at `step` when nothing happens: with
  // one rank, in steps of one phase. Makes a job in `state_dir`, which exists,
  // and leaves it there.
  absl::StatusOr<uint64_t> UndisturbedDigest(const std::string& state_dir,
                                             uint64_t step) const;

 private:
  const uint32_t ranks_;
  const Layout layout_;
  std::vector<Hyperparams> groups_;
  uint64_t values_step_ = UINT64_MAX;
  std::vector<float> values_;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_TINY_JOB_H_
