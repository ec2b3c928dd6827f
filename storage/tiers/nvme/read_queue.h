#ifndef OPTSTATE_STORAGE_TIERS_NVME_READ_QUEUE_H_
#define OPTSTATE_STORAGE_TIERS_NVME_READ_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "storage/tiers/nvme/record_cache.h"

namespace optstate::nvme {

// The records that are to be read: first those that threads wait for, then the
// next ones of the pass. No I/O.
//
// Invariants: a record is_demanded exactly when it is in the queue of those
// that threads wait for, which has it once. All records of the pass before the
// position of reading ahead were in memory or taken when it went past them.
//
// Allocates only in the constructor.
//
// Threads: not thread-safe; the store's lock is held.
class ReadQueue {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  // `cache` outlives this.
  explicit ReadQueue(RecordCache* cache);

  // Notes that a thread waits for the record. False: this was known.
  bool Demand(uint32_t record);
  size_t demanded() const { return demanded_.size(); }
  // Returns the record that was demanded first, and takes it out.
  uint32_t first_demanded() const { return demanded_.front(); }
  void PopDemanded();

  // Begins a pass over the records with a `wanted` other than 0: those that are
  // in frames come first. Returns how many they are.
  size_t BeginPass(absl::Span<const uint8_t> wanted);
  uint32_t record_of_pass(size_t position) const { return pass_[position]; }
  // Returns the next record of the pass that is to be read; kNone: there is
  // none.
  uint32_t NextAhead();
  // Returns how many records are to be read, `max` at most.
  size_t CountWanted(size_t max) const;
  // Says whether there is a record that is to be read: frames will be given up.
  bool NeedsFrames() const {
    return read_ahead_ < pass_.size() || !demanded_.empty();
  }

  void OnCommitRequested();
  // Says whether there was one pass between the last two commits requested.
  bool IsEachPassCommitted() const { return passes_before_ == 1; }

 private:
  RecordCache& cache_;
  std::vector<uint32_t> demanded_;
  std::vector<uint32_t> pass_;
  size_t read_ahead_ = 0;  // position in the pass
  // Passes since the last commit was requested, and before that.
  uint32_t passes_ = 0;
  uint32_t passes_before_ = 0;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_READ_QUEUE_H_
