#ifndef OPTSTATE_STORAGE_TIERS_NVME_RECORD_MOVER_H_
#define OPTSTATE_STORAGE_TIERS_NVME_RECORD_MOVER_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/io/io_engine.h"
#include "storage/record_rewrite.h"
#include "storage/tiers/nvme/committer.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/next_arrangement.h"
#include "storage/tiers/nvme/record_cache.h"
#include "storage/tiers/nvme/store_context.h"
#include "storage/tiers/nvme/store_monitor.h"

namespace optstate::nvme {

// Moves the records of a store to another arrangement while the store is used.
//
// Each record that Swapper writes meanwhile is written twice, to the same slot
// of both arrangements. What is not written is copied, slot by slot: the thread
// of I/O reads it, the thread that calls Copy() compares its checksums, and the
// thread of I/O writes it. So the slots that count and lack a copy become
// fewer, whatever steps do, and when none is left, what is still to be done
// does not grow with the records: NextArrangement::Seal().
//
// While others use the disks, one slot is copied at a time, as the last of all
// requests; else some side by side.
//
// Invariants:
// - A slot that has_copy_ is in the next arrangement as it is in the present
//   one, or will be when the writes under way are over.
// - A slot is not written while it is being read, or its copy written
//   (IsCopying()). What was read, and is written anew before the write of its
//   copy has begun, is dropped.
// - The present arrangement is only read for this: whatever ends leaves it.
//
// Errors: one of the next arrangement's files, and a record that is damaged,
// end the move and nothing else. A damaged record that a frame has as it was
// written is to be written anew, as by Verify().
//
// Threads: Begin(), Seal(), End() and Reset() are called while the thread of
// I/O does not run; Copy(), Cancel() and the questions take the store's lock;
// it is held for all else. Begin() allocates, and nothing that steps wait for.
// Size: one method for each event in the life of a move and of a slot's copy,
// which share the invariants above, so no part of them stands alone.
class RecordMover {
 public:
  // The arguments must outlive this object.
  RecordMover(const StoreContext* context, StoreMonitor* monitor,
              RecordCache* cache, const Committer* committer)
      : context_(*context),
        monitor_(*monitor),
        cache_(*cache),
        committer_(*committer) {}

  // Makes the files. The target outlives the move. FAILED_PRECONDITION: one is
  // under way; other errors are those of NextArrangement, and leave nothing.
  absl::Status Begin(const storage::RewriteTarget* target);
  // Copies until no slot that counts lacks a copy and no commit is under way.
  // Returns the error that ended the move or the store. Called once a move, by
  // one thread.
  absl::Status Copy();
  // Makes the next arrangement whole, after Copy(). No commit is under way.
  absl::Status Seal();
  // Ends the move, if there is one. The files are closed, and removed unless
  // they are the job's. Copy() has returned.
  void End(bool is_adopted);
  // Has Copy(), and Seal() if it comes later, return an error.
  void Cancel(const absl::Status& why);
  // Is ready for the context's present frames.
  void Reset();

  // Returns how far the move is; nullopt: there is none.
  std::optional<storage::RewriteState> state() const;
  // Returns the target of the move that is under way, and the bytes of records
  // that it has written.
  const storage::RewriteTarget* target() const;
  uint64_t bytes() const;

  // Begins what can be begun.
  void Start();
  // Writes the frame, whose write to its slot has begun, to the next
  // arrangement too. False: there is none.
  bool Mirror(uint32_t frame);
  // Says whether the request is the mover's.
  bool Owns(const io::IoRequest* request) const;
  // Goes on after the mover's request. Returns the frame that it wrote for
  // Mirror(); kNoFrame: it was another one.
  uint32_t Complete(const io::IoRequest* request);
  // Says whether this slot is being copied, so that it must not be written.
  bool IsCopying(uint32_t record, uint32_t slot) const;

 private:
  enum class Phase : uint8_t { kCopying, kSyncing, kSynced };
  // A slot on its way, with memory for it.
  struct SlotCopy {
    enum class Phase : uint8_t {
      kIdle,
      kReading,
      kLoaded,    // to be compared, by the thread that is in Copy()
      kChecking,  // that thread is at it, without the lock
      kChecked,   // to be written
      kWriting,
    };
    Phase phase = Phase::kIdle;
    bool is_stale = false;  // kChecking: its slot was written meanwhile
    uint8_t attempts = 0;
    uint32_t record = 0;
    uint32_t slot = 0;
    std::vector<uint32_t> sums;  // that it must have
    std::unique_ptr<std::byte, decltype(&std::free)> buffer{nullptr,
                                                            &std::free};
    io::IoRequest request;
  };

  absl::StatusOr<std::vector<SlotCopy>> MakeCopies() const;
  void Fail(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Says whether the slot is to survive. While a commit is made, a slot that it
  // may name counts too, though its frame has become newer.
  bool Counts(uint32_t record, uint32_t slot) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  bool LacksCopy(uint32_t record, uint32_t slot) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu) {
    return Counts(record, slot) && !has_copy_[record][slot];
  }
  bool IsAllCopied() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Says whether the slot is being written, or is going to be.
  bool IsBeingWritten(uint32_t record, uint32_t slot) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Says whether that is so, or the slot is on its way already.
  bool IsBusy(uint32_t record, uint32_t slot) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void NoteCopy(uint32_t record, uint32_t slot)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);

  // Begins reads as far as there is room. Returns how many slots are on their
  // way.
  size_t StartReads() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Assigns the next slot that lacks a copy. False: none can be copied now.
  bool Choose(SlotCopy* copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void SubmitRead(SlotCopy* copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void SubmitWrite(SlotCopy* copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void BeginSync() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  SlotCopy* FindLoaded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Compares what was read; releases the lock meanwhile.
  void Check(SlotCopy* copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Drops what was read of a slot that is written anew.
  void DropCopyOf(uint32_t record, uint32_t slot)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  uint32_t FrameOf(const io::IoRequest* request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  bool IsSync(const io::IoRequest* request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void CompleteCopy(SlotCopy* copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void CompleteSync(const io::IoRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);

  const StoreContext& context_;
  StoreMonitor& monitor_;
  RecordCache& cache_ ABSL_GUARDED_BY(monitor_.mu);
  const Committer& committer_;
  // Null without a move.
  std::unique_ptr<NextArrangement> next_ ABSL_GUARDED_BY(monitor_.mu);
  absl::Status status_ ABSL_GUARDED_BY(monitor_.mu);  // why it has ended
  Phase phase_ ABSL_GUARDED_BY(monitor_.mu) = Phase::kCopying;
  std::optional<storage::RewriteState> state_ ABSL_GUARDED_BY(monitor_.mu);
  std::chrono::steady_clock::time_point began_at_ ABSL_GUARDED_BY(monitor_.mu);
  uint64_t bytes_ ABSL_GUARDED_BY(monitor_.mu) = 0;
  // By record and slot.
  std::vector<std::array<bool, FrameTable::kSlotsMax>> has_copy_
      ABSL_GUARDED_BY(monitor_.mu);
  std::vector<SlotCopy> copies_ ABSL_GUARDED_BY(monitor_.mu);
  uint32_t cursor_ ABSL_GUARDED_BY(monitor_.mu) = 0;  // the record to look at
  // By frame, its second write.
  std::vector<io::IoRequest> mirrors_ ABSL_GUARDED_BY(monitor_.mu);
  std::vector<io::IoRequest> syncs_ ABSL_GUARDED_BY(monitor_.mu);
  size_t syncs_left_ ABSL_GUARDED_BY(monitor_.mu) = 0;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_RECORD_MOVER_H_
