#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_LAG_PASS_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_LAG_PASS_H_

#include "absl/status/status.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/record_lag.h"
#include "storage/state_store.h"

namespace optstate::scheduler {

// Brings all records that lag behind copies up to date, in one pass over them;
// with `is_written` no copy counts from then on. `lag` may be null, then there
// are none. An error is the first one of the store; the other records are up to
// date all the same.
//
// Threads: as StateStore::BeginPass(). Allocates.
absl::Status CatchUpRecords(storage::RecordLag* lag, bool is_written,
                            storage::StateStore* store, WorkerPool* pool);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_LAG_PASS_H_
