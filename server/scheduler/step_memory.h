#ifndef OPTSTATE_SERVER_SCHEDULER_STEP_MEMORY_H_
#define OPTSTATE_SERVER_SCHEDULER_STEP_MEMORY_H_

#include <cstddef>

#include "absl/types/span.h"
#include "server/scheduler/worker_undo.h"
#include "storage/format/control_file.h"
#include "storage/host_tier.h"
#include "storage/state_store.h"

namespace optstate::scheduler {

// The job's memory that steps work on, most of which outlives the process; it
// outlives the rooms of the scheduler.
struct StepMemory {
  storage::StateStore* store = nullptr;
  storage::RecoveryArrays recovery;
  storage::ControlFile* control = nullptr;
  absl::Span<WorkerUndo> undo;        // by worker
  absl::Span<std::byte> redo;         // by worker, of non-separable updates
  absl::Span<std::byte> speculation;  // empty: no speculation
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_STEP_MEMORY_H_
