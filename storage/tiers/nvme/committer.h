#ifndef OPTSTATE_STORAGE_TIERS_NVME_COMMITTER_H_
#define OPTSTATE_STORAGE_TIERS_NVME_COMMITTER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "storage/durable_commit.h"
#include "storage/io/io_engine.h"
#include "storage/tiers/nvme/durable_log.h"
#include "storage/tiers/nvme/read_queue.h"
#include "storage/tiers/nvme/record_cache.h"
#include "storage/tiers/nvme/store_context.h"
#include "storage/tiers/nvme/store_monitor.h"

namespace optstate::nvme {

// Makes steps durable, in phases:
// 1. flushing: Swapper writes the records that are newer in their frames;
// 2. syncing: the files of records are synced, the directories side by side;
// 3. writing: the log gets a commit that names the slots now synced;
// 4. syncing the log.
// The last two are done twice, for both regions of the log, and the commit is
// durable after that (see DurableLog).
//
// Invariants: a slot that the last durable commit names is never written; while
// a commit is made, only what belongs to it is written. A store that has failed
// begins no phase. Between syncing's begin and its success the frame table says
// so, and the next engine writes anew what may be in a cache only.
//
// Threads: Request(), Await(), durable_step() and durable_job() take the
// store's lock; it is held for all else.
class Committer {
 public:
  // The arguments must outlive this object.
  Committer(StoreContext* context, StoreMonitor* monitor, RecordCache* cache,
            ReadQueue* queue);
  // Takes over the last commit of the job in the log, if there is one, and the
  // number of directories. Called again when the records are arranged anew.
  void Adopt();

  // See NvmeStore::RequestCommit(), AwaitCommit().
  absl::Status Request(uint64_t step, absl::string_view job);
  absl::Status Await();
  uint64_t durable_step() const;
  std::string durable_job() const;
  // Returns the last durable commit, but for its checksums; of generation 0:
  // there is none of this job.
  storage::DurableCommit last() const;

  // Begins to sync when all is flushed.
  void Advance();
  bool is_committing() const;
  bool is_flushing() const;
  // Returns the number of records that the commit still has to write.
  uint64_t records_to_flush() const;
  // Notes that the record has been written.
  void OnWritten(uint32_t record);
  // Goes on after a request of the commit.
  void Complete(const io::IoRequest& request);

  static constexpr uint8_t kNoSlot = 2;
  // Returns the slot that the last durable commit names, or kNoSlot.
  uint8_t durable_slot(uint32_t record) const;
  // Returns the slot that the record may be written to.
  uint32_t SlotToWrite(uint32_t record) const;

 private:
  enum class Phase : uint8_t {
    kNone,
    kFlushing,
    kSyncing,
    kWriting,
    kSyncingLog,
  };

  void BeginSync() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void NameSlots() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void WriteCommit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void SyncLog() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void EndCommit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);

  StoreContext& context_;
  StoreMonitor& monitor_;
  RecordCache& cache_ ABSL_GUARDED_BY(monitor_.mu);
  ReadQueue& queue_ ABSL_GUARDED_BY(monitor_.mu);
  std::vector<uint8_t> durable_slots_ ABSL_GUARDED_BY(monitor_.mu);
  bool is_durable_ ABSL_GUARDED_BY(monitor_.mu) = false;  // some step is
  uint64_t durable_step_ ABSL_GUARDED_BY(monitor_.mu) = 0;
  std::string durable_job_ ABSL_GUARDED_BY(monitor_.mu);
  Phase phase_ ABSL_GUARDED_BY(monitor_.mu) = Phase::kNone;
  storage::DurableCommit commit_ ABSL_GUARDED_BY(monitor_.mu);
  uint32_t copies_left_ ABSL_GUARDED_BY(monitor_.mu) = 0;  // to be written
  uint64_t flushes_left_ ABSL_GUARDED_BY(monitor_.mu) = 0;
  size_t syncs_left_ ABSL_GUARDED_BY(monitor_.mu) = 0;
  // The syncs of the records, by directory.
  std::vector<io::IoRequest> syncs_ ABSL_GUARDED_BY(monitor_.mu);
  io::IoRequest sync_of_log_ ABSL_GUARDED_BY(monitor_.mu);
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_COMMITTER_H_
