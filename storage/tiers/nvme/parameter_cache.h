#ifndef OPTSTATE_STORAGE_TIERS_NVME_PARAMETER_CACHE_H_
#define OPTSTATE_STORAGE_TIERS_NVME_PARAMETER_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/io/io_engine.h"
#include "storage/record_view.h"
#include "storage/swap_state.h"
#include "storage/tiers/nvme/frame_list.h"
#include "storage/tiers/nvme/record_cache.h"
#include "storage/tiers/nvme/store_context.h"
#include "storage/tiers/nvme/store_monitor.h"

namespace optstate::nvme {

// The parameters of records that are on disk alone, in a bounded number of
// entries in memory. An entry has the section of parameters of one record, so
// that reading a parameter does not read its masters and state.
//
// An entry is given up for another record when it was used longest ago, and is
// neither in use nor kept. Prefetched entries are kept until they are released,
// or until a thread waits for another record and there is no other room.
//
// Invariants:
// - An entry has what its record's slot had when the read began. The record is
//   dropped before it is changed, so what is found here is never older than the
//   record.
// - A slot of which a section is being read is not written (IsReading()).
// - Bytes are compared with their checksum before they are used, by the thread
//   that wants them.
//
// Allocates only in Open().
//
// Threads: Read() takes the store's lock; it is held for all else.
class ParameterCache {
 public:
  // The arguments must outlive this object.
  ParameterCache(const StoreContext* context, StoreMonitor* monitor,
                 const RecordCache* cache);

  // Takes the memory, where the context's records hold the parameters.
  // RESOURCE_EXHAUSTED: there is none.
  absl::Status Open();

  // Calls use(view) once with the parameters of a record that is on disk; the
  // view has nothing else. Waits for a read when the cache lacks them. False:
  // the record has come to a frame, where they are. Errors: those of the disk;
  // DATA_LOSS, with file and offset, when the checksum differs.
  using Use = absl::FunctionRef<void(const storage::RecordView&)>;
  absl::StatusOr<bool> Read(uint32_t record, Use use);

  // Has the record read ahead, and keeps it. What there is no room for is left
  // out.
  void Prefetch(uint32_t record);
  // Keeps the record no longer.
  void Release(uint32_t record);
  // Forgets the record, which is about to be changed.
  void Drop(uint32_t record);
  // Notes that a parameter was read from a record in a frame.
  void CountFromFrame();

  // Begins the reads that threads wait for, and those of records ahead.
  void StartDemanded();
  void StartAhead();
  // Says whether the request is one of this cache's.
  bool Owns(const io::IoRequest* request) const;
  // Goes on after the cache's request.
  void Complete(const io::IoRequest* request);
  // Says whether this slot is being read, so that it must not be written.
  bool IsReading(uint32_t record, uint32_t slot) const;

  storage::ParameterCacheState state() const;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  enum class State : uint8_t {
    kFree,
    kWanted,  // to be read
    kReading,
    kLoaded,  // read, not compared
    kReady,
    kFailed,  // could not be read
  };
  struct Entry {
    State state = State::kFree;
    bool is_kept = false;
    bool is_checking = false;  // kLoaded: a thread compares it
    bool is_stale = false;     // belongs to no record any more
    uint8_t attempts = 0;
    uint32_t users = 0;  // threads that use the bytes
    uint32_t record = 0;
    uint32_t slot = 0;
    uint32_t sum = 0;  // that the bytes must have
    absl::Status error;
    io::IoRequest request;
  };
  struct Freed {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  std::byte* SectionAt(uint32_t entry) const {
    return memory_.get() + entry * context_.record_layout.section_bytes_max();
  }
  // Returns an entry for another record; kNone: there is none now.
  uint32_t TakeEntry(bool is_demanded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void Assign(uint32_t entry, uint32_t record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void Free(uint32_t entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Returns the entry that a thread waits for, found or taken; kNone: there is
  // no room now.
  uint32_t Demand(uint32_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  absl::Status Check(uint32_t entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void UseEntry(uint32_t entry, Use use)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void Start(FrameList* wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void Submit(uint32_t entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);

  const StoreContext& context_;
  StoreMonitor& monitor_;
  const RecordCache& cache_ ABSL_GUARDED_BY(monitor_.mu);
  std::unique_ptr<std::byte, Freed> memory_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(monitor_.mu);
  std::vector<uint32_t> entry_of_ ABSL_GUARDED_BY(monitor_.mu);  // by record
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(monitor_.mu);
  // Entries that are kWanted: a thread waits for those in the first list.
  FrameList demanded_ ABSL_GUARDED_BY(monitor_.mu);
  FrameList ahead_ ABSL_GUARDED_BY(monitor_.mu);
  // Entries that have bytes or an error and no user, the one used longest ago
  // first.
  FrameList idle_ ABSL_GUARDED_BY(monitor_.mu);
  std::vector<uint32_t> reading_ ABSL_GUARDED_BY(monitor_.mu);
  storage::ParameterCacheCounters counters_ ABSL_GUARDED_BY(monitor_.mu);
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_PARAMETER_CACHE_H_
