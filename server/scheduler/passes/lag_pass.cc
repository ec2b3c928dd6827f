#include "server/scheduler/passes/lag_pass.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/types/status_macros.h"
#include "server/scheduler/first_error.h"

namespace optstate::scheduler {

absl::Status CatchUpRecords(storage::RecordLag* lag, bool is_written,
                            storage::StateStore* store, WorkerPool* pool) {
  if (lag == nullptr) return absl::OkStatus();
  std::vector<uint8_t> wanted(store->sub_groups().size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    wanted[i] = lag->Concerns(store->sub_groups()[i], is_written) ? 1 : 0;
  }
  if (std::find(wanted.begin(), wanted.end(), 1) == wanted.end()) {
    return absl::OkStatus();
  }
  // A pass, so that the next records are read meanwhile.
  OPTSTATE_ASSIGN_OR_RETURN(const size_t positions, store->BeginPass(wanted));
  FirstError error;
  std::atomic<size_t> next{0};
  pool->ParallelFor(positions, [&](size_t index) {
    // Records in memory are on their workers' nodes; others are read in order.
    const size_t position = store->is_resident()
                                ? index
                                : next.fetch_add(1, std::memory_order_relaxed);
    const auto pin = store->PinOfPass(position);
    if (!pin.ok()) return error.Note(pin.status());
    lag->MakeCurrent(pin->record(), is_written);
  });
  return error.status();
}

}  // namespace optstate::scheduler
