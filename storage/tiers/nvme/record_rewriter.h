#ifndef OPTSTATE_STORAGE_TIERS_NVME_RECORD_REWRITER_H_
#define OPTSTATE_STORAGE_TIERS_NVME_RECORD_REWRITER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/sub_groups.h"
#include "storage/arrangement.h"
#include "storage/durable_commit.h"
#include "storage/io/io_engine.h"
#include "storage/record_rewrite.h"
#include "storage/tiers/nvme/durable_log.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/nvme_options.h"
#include "storage/tiers/nvme/record_files.h"
#include "storage/tiers/nvme/record_layout.h"
#include "storage/tiers/nvme/store_context.h"

namespace optstate::nvme {

// Writes all records of a store to files of another arrangement, with a frame
// table and, of a durable job, commits of their own. What the job has until
// then is only read, so that it stands until the caller has the new table take
// the place of the former one; StoreOpener does the rest.
//
// A record has up to two slots that count: that of the last durable commit, and
// that of memory, unless its frame is newer. Both are copied as they are, so
// that the job goes on at the same step, in memory as after a power cut.
//
// Takes the memory of some records, for the time of the copy.
//
// Threads: used by one thread, while the thread of I/O does not run.
class RecordRewriter {
 public:
  // `context`, `target` and what they have outlive this. `durable`: the last
  // durable commit, of generation 0 if there is none. `keeps_frames`: the next
  // table names the frames that the present one names; else each record must be
  // on disk as it is in memory.
  RecordRewriter(StoreContext* context, const storage::RewriteTarget* target,
                 storage::DurableCommit durable, bool keeps_frames);

  // Is told the bytes of records that are written, and of all that are to be:
  // before the first of them, and after each few.
  using Progress =
      absl::FunctionRef<void(uint64_t bytes, uint64_t bytes_total)>;

  // Writes all, durably. On an error nothing of it is left.
  // RESOURCE_EXHAUSTED: there is no room for two arrangements at once;
  // DATA_LOSS: a record is damaged; INTERNAL: the layouts do not fit.
  absl::Status Write(Progress progress);
  // Removes what Write() has written to this arrangement.
  static void Remove(io::IoEngine* engine,
                     const storage::Arrangement& arrangement);
  // Returns the bytes of records that were written.
  uint64_t bytes() const { return bytes_; }

 private:
  struct Copy {
    uint32_t record;
    uint32_t slot;
  };
  using Buffer = std::unique_ptr<std::byte, decltype(&std::free)>;

  FrameTable::Shape ShapeOf() const;
  // Says whether the slot has bytes of the record that are to survive.
  bool Counts(uint32_t record, uint32_t slot) const;
  absl::Status CheckLayouts() const;
  // Returns the bytes of a slot of the record in the next arrangement.
  uint64_t WrittenBytes(uint32_t record) const;
  // Returns what is to be copied, in order.
  std::vector<Copy> Copies() const;
  absl::Status WriteFiles(Progress progress);
  absl::Status CopyRecords(const RecordFiles& files, Progress progress);
  absl::Status CopyBatch(absl::Span<const Copy> batch, const RecordFiles& files,
                         absl::Span<const Buffer> from,
                         absl::Span<const Buffer> to);
  void SetPlaces();
  absl::Status WriteLog();
  // Runs requests side by side to their end; reads that fail are tried again.
  absl::Status Run(absl::Span<io::IoRequest> requests);

  StoreContext& context_;
  const storage::RewriteTarget& target_;
  const storage::DurableCommit durable_;
  const bool keeps_frames_;
  const SubGroupTable sub_groups_;
  const RecordLayout layout_;
  const std::vector<uint32_t> weights_;  // in their smallest form
  FrameTable table_;
  uint64_t bytes_ = 0;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_RECORD_REWRITER_H_
