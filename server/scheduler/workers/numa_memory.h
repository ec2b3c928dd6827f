#ifndef OPTSTATE_SERVER_SCHEDULER_WORKERS_NUMA_MEMORY_H_
#define OPTSTATE_SERVER_SCHEDULER_WORKERS_NUMA_MEMORY_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/scheduler/workers/worker_placement.h"

namespace optstate::scheduler {

// The part of some number of indices that the participants of one node own, as
// WorkerPool::ShareOf defines it.
struct NodeShare {
  int node = 0;
  size_t begin = 0;
  size_t end = 0;
};
std::vector<NodeShare> NodeShares(const WorkerPlacement& placement,
                                  size_t total);

// Moves the pages of `memory` (a mapping of a file on tmpfs) to the node, and
// has later ones allocated there; from other nodes when this one has none left.
// First touch would not suffice: reserving the file has already taken the
// pages. The ends are rounded to 2 MiB, so that neighbours meet and no huge
// page is cut.
absl::Status MoveToNode(absl::Span<std::byte> memory, int node);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_WORKERS_NUMA_MEMORY_H_
