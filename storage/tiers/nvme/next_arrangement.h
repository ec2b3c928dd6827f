#ifndef OPTSTATE_STORAGE_TIERS_NVME_NEXT_ARRANGEMENT_H_
#define OPTSTATE_STORAGE_TIERS_NVME_NEXT_ARRANGEMENT_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/sub_groups.h"
#include "storage/arrangement.h"
#include "storage/durable_commit.h"
#include "storage/io/io_engine.h"
#include "storage/record_rewrite.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/record_files.h"
#include "storage/tiers/nvme/record_layout.h"
#include "storage/tiers/nvme/store_context.h"

namespace optstate::nvme {

// Says whether a slot of a record has bytes that are to survive: the last
// durable commit names it (`durable_slot`; Committer::kNoSlot: none), or it is
// that of memory, and no frame is newer. A record has up to two such slots.
inline bool SlotCounts(const RecordPlace& place, uint32_t durable_slot,
                       uint32_t slot) {
  if (slot == durable_slot) return true;
  const bool is_newer = place.frame != RecordPlace::kNoFrame && place.is_dirty;
  return place.is_on_disk && place.slot == slot && !is_newer;
}

// The arrangement that a store's records are to have: files of records, a frame
// table and, of a durable job, commits of their own. What the store has until
// then is only read, so that it stands until the caller has the new table take
// the place of the former one; StoreOpener does the rest.
//
// The caller writes to the files what each slot that counts has, and puts its
// checksums into the table, between Create() and Seal().
//
// Threads: used while no other thread uses the engine, but for the files and
// the checksums.
class NextArrangement {
 public:
  // `context`, `target` and what they have outlive this. `keeps_frames`: the
  // next table names the frames that the present one names; else each record
  // must be on disk as it is in memory.
  NextArrangement(const StoreContext* context,
                  const storage::RewriteTarget* target, bool keeps_frames);
  NextArrangement(const NextArrangement&) = delete;
  NextArrangement& operator=(const NextArrangement&) = delete;

  // Makes the files, in place of any that were left, and the table. On an error
  // nothing of it is left. RESOURCE_EXHAUSTED: there is no room for two
  // arrangements at once; INVALID_ARGUMENT: the weights; INTERNAL: the layouts
  // do not fit.
  absl::Status Create();
  // Makes durable what was written, has the table name it, and writes the
  // commits. `durable`: the last durable commit, of generation 0 if there is
  // none.
  absl::Status Seal(const storage::DurableCommit& durable);
  // Closes the files, if they are open.
  void Close();
  // Removes the files of an arrangement that did not come about, if they are
  // there and not open.
  static void Remove(io::IoEngine* engine,
                     const storage::Arrangement& arrangement);

  const storage::RewriteTarget& target() const { return target_; }
  const RecordLayout& layout() const { return layout_; }
  // The files that Create() made.
  const RecordFiles& files() const { return *files_; }
  const FrameTable& table() const { return table_; }
  // Returns the bytes of a slot of the record.
  uint64_t WrittenBytes(uint32_t record) const;
  // See SlotCounts().
  bool Counts(const storage::DurableCommit& durable, uint32_t record,
              uint32_t slot) const;

 private:
  FrameTable::Shape ShapeOf() const;
  absl::Status CheckLayouts() const;
  void SetPlaces(const storage::DurableCommit& durable);
  absl::Status WriteLog(const storage::DurableCommit& durable) const;

  const StoreContext& context_;
  const storage::RewriteTarget& target_;
  const bool keeps_frames_;
  const SubGroupTable sub_groups_;
  const RecordLayout layout_;
  const std::vector<uint32_t> weights_;  // in their smallest form
  FrameTable table_;
  std::optional<RecordFiles> files_;  // while they are open
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_NEXT_ARRANGEMENT_H_
