#ifndef OPTSTATE_STORAGE_TIERS_NVME_FRAME_CHECKS_H_
#define OPTSTATE_STORAGE_TIERS_NVME_FRAME_CHECKS_H_

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/tiers/nvme/record_cache.h"
#include "storage/tiers/nvme/store_context.h"
#include "storage/tiers/nvme/store_monitor.h"

namespace optstate::nvme {

// Compares what was read to a frame with its checksums, and takes those of what
// is to be written.
//
// Invariant: while a frame is checked or summed, which is done without the
// lock, its flag keeps other threads from giving it up or changing it. The
// checksums of a frame that is summed belong to the thread that does it.
//
// Threads: the store's lock is held; Check() and Sum() release it meanwhile.
class FrameChecks {
 public:
  // The arguments must outlive this object.
  FrameChecks(const StoreContext* context, StoreMonitor* monitor,
              RecordCache* cache);

  // Makes room for the checksums of the context's present frames.
  void Reset();

  // Compares what was read with its checksums, or makes the zeros of a record
  // that was never written; then the record is in its frame.
  // `with_parameters`: they were read too, and are put in their area, if there
  // is one.
  absl::Status Check(uint32_t record, bool with_parameters);
  // Takes the checksums of a frame that no thread changes. On a thread that has
  // just updated the record its bytes are still in the caches.
  void Sum(uint32_t frame);
  // Puts what Sum() took to the slot that the frame is to be written to.
  void PutSums(uint32_t frame);

 private:
  absl::Status CheckLocked(uint32_t record, bool with_parameters)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void SumLocked(uint32_t frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  absl::Span<uint32_t> SumsOf(uint32_t frame) {
    const uint64_t count = context_.record_layout.record_checksums_max();
    return absl::MakeSpan(sums_).subspan(frame * count, count);
  }

  const StoreContext& context_;
  StoreMonitor& monitor_;
  RecordCache& cache_ ABSL_GUARDED_BY(monitor_.mu);
  std::vector<uint32_t> sums_;  // by frame
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_FRAME_CHECKS_H_
