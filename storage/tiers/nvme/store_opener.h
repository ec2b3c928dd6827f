#ifndef OPTSTATE_STORAGE_TIERS_NVME_STORE_OPENER_H_
#define OPTSTATE_STORAGE_TIERS_NVME_STORE_OPENER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "proto/types/layout.h"
#include "storage/durable_commit.h"
#include "storage/swap_sizes.h"
#include "storage/tiers/nvme/committer.h"
#include "storage/tiers/nvme/durable_log.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/nvme_options.h"
#include "storage/tiers/nvme/store_context.h"

namespace optstate::nvme {

// Opens the files and the frame table of a store: a new one, one that an engine
// left, or one from a commit.
//
// Threads: used before the thread of I/O begins; the store's lock is not held
// but where that is said.
class StoreOpener {
 public:
  // See NvmeStore::SizesOf().
  static storage::SwapSizes SizesOf(const Layout& layout,
                                    uint64_t sub_group_elements,
                                    const NvmeSizeOptions& options);

  // `context` outlives this.
  explicit StoreOpener(StoreContext* context) : context_(*context) {}

  // Sets the context's weights, files, log and table. `restored` is null unless
  // the job goes on at a commit. Checks all before it touches any file.
  absl::Status Open(const storage::DurableCommit* restored);
  // Finds records that may be in a cache only after a sync that failed, or
  // whose end the former engine did not see: no later sync knows of them. Those
  // in frames are made dirty, so that the next commit flushes them. Returns, by
  // record, 1 for the others, which are to be written again. The committer has
  // adopted the log, and the cache adopts the table afterwards. The store's
  // lock is held.
  std::vector<uint8_t> MarkUnsynced(const Committer& committer);

 private:
  FrameTable::Shape ShapeOf() const;
  absl::Status ChooseWeights(const storage::DurableCommit* restored);
  absl::Status CheckRestored(const storage::DurableCommit& restored) const;
  absl::Status OpenFiles(bool is_new, const storage::DurableCommit* restored);
  absl::Status CheckNothingDurable() const;
  absl::Status OpenLog(bool is_new);
  void RemoveOtherArrangements() const;
  void MakeTable(const storage::DurableCommit* restored);

  StoreContext& context_;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_STORE_OPENER_H_
