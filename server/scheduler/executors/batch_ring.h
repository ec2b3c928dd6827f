#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BATCH_RING_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BATCH_RING_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/executors/update_batch.h"

namespace optstate::scheduler {

// Batches that are submitted and finished in turn: those under way begin at
// `oldest`, and the next one is filled.
struct BatchRing {
  // A batch and its device.
  struct Slot {
    std::unique_ptr<UpdateBatch> batch;
    size_t device = 0;          // index
    bool is_submitted = false;  // the device has it
  };

  // Makes so many batches, for these devices in turn; none without a device.
  static absl::StatusOr<BatchRing> Make(
      size_t size, absl::Span<const size_t> devices,
      absl::FunctionRef<
          absl::StatusOr<std::unique_ptr<UpdateBatch>>(size_t device)>
          make) {
    BatchRing ring;
    ring.batches.resize(devices.empty() ? 0 : size);
    for (size_t i = 0; i < ring.batches.size(); ++i) {
      Slot& slot = ring.batches[i];
      slot.device = devices[i % devices.size()];
      OPTSTATE_ASSIGN_OR_RETURN(slot.batch, make(slot.device));
    }
    return ring;
  }
  Slot& filling() { return batches[(oldest + under_way) % batches.size()]; }

  std::vector<Slot> batches;
  size_t oldest = 0;
  size_t under_way = 0;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BATCH_RING_H_
