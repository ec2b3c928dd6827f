#ifndef OPTSTATE_SERVER_SESSION_TIERS_AUTO_PLACEMENT_H_
#define OPTSTATE_SERVER_SESSION_TIERS_AUTO_PLACEMENT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/types.pb.h"
#include "server/session/tiers/disk_rates.h"
#include "storage/swap_sizes.h"

namespace optstate::session {

// The facts that PLACEMENT_AUTO decides by, beside whether settings are
// admitted.
struct PlacementQuestion {
  v1::StorageSettings asked;
  storage::SwapSizes sizes;  // of the job with its records on disk
  bool has_disk = false;     // the daemon has a directory
  // The budget of a job that names none, unless the node has a budget.
  uint64_t default_budget_bytes = 0;
  // Bytes left of the node's budget; nullopt: there is no such budget.
  std::optional<uint64_t> node_budget_left;
};

// Says whether the node can give what such a job takes, RESOURCE_EXHAUSTED with
// what is needed and left if not.
using Admits = absl::FunctionRef<absl::Status(const v1::StorageSettings&)>;

// Returns the settings with a placement, and with NVME the host budget: HOST if
// that is admitted; else NVME with the budget that was asked for, or else the
// largest that is admitted, at most all records and what the node's budget has
// left (or the default). `placement_reason` says why, without what is expected.
// Errors: those of `admits` for the least that such a job takes.
absl::StatusOr<v1::StorageSettings> ChoosePlacement(
    const PlacementQuestion& question, Admits admits);

// Expected time of a step; 0: none, or not known. Records are read and written
// while others are updated, so a step takes the longer of both.
struct StepEstimate {
  double memory_s = 0;  // reading and writing the state once
  double disk_s = 0;    // of the disk that takes longest
  uint64_t disk_bytes = 0;
};

// Estimates from the records alone, without gradients and parameters. `rates`
// are those of the directories, `memory_bytes_per_s` that of all workers; 0: it
// is not known.
StepEstimate EstimateStep(const v1::StorageSettings& storage,
                          const storage::SwapSizes& sizes,
                          const DiskRates& rates, double memory_bytes_per_s);

// Returns a text such as "a step moves 16.0 GiB on disk in 7.80 s and the state
// in memory in 0.90 s: the disk is the limit".
std::string TextOf(const StepEstimate& estimate);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TIERS_AUTO_PLACEMENT_H_
