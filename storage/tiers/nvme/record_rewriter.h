#ifndef OPTSTATE_STORAGE_TIERS_NVME_RECORD_REWRITER_H_
#define OPTSTATE_STORAGE_TIERS_NVME_RECORD_REWRITER_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/durable_commit.h"
#include "storage/record_rewrite.h"
#include "storage/tiers/nvme/next_arrangement.h"
#include "storage/tiers/nvme/store_context.h"

namespace optstate::nvme {

// Writes all records of a store to files of another arrangement, for a layout
// that extends the job's, while nothing else uses the store.
//
// The slots that count are copied as they are, so that the job goes on at the
// same step, in memory as after a power cut.
//
// Takes the memory of some records, for the time of the copy.
//
// Threads: used by one thread, while the thread of I/O does not run.
class RecordRewriter {
 public:
  // `context`, `target` and what they have outlive this. `durable`: the last
  // durable commit, of generation 0 if there is none. Each record must be on
  // disk as it is in memory.
  RecordRewriter(const StoreContext* context,
                 const storage::RewriteTarget* target,
                 storage::DurableCommit durable);

  // Is told the bytes of records that are written, and of all that are to be:
  // before the first of them, and after each few.
  using Progress =
      absl::FunctionRef<void(uint64_t bytes, uint64_t bytes_total)>;

  // Writes all, durably. On an error nothing of it is left. Errors are those of
  // NextArrangement; DATA_LOSS: a record is damaged.
  absl::Status Write(Progress progress);
  // Returns the bytes of records that were written.
  uint64_t bytes() const { return bytes_; }

 private:
  struct Copy {
    uint32_t record;
    uint32_t slot;
  };
  using Buffer = std::unique_ptr<std::byte, decltype(&std::free)>;

  // Returns what is to be copied, in order.
  std::vector<Copy> Copies() const;
  absl::Status CopyRecords(Progress progress);
  absl::Status CopyBatch(absl::Span<const Copy> batch,
                         absl::Span<const Buffer> from,
                         absl::Span<const Buffer> to);

  const StoreContext& context_;
  const storage::DurableCommit durable_;
  NextArrangement next_;
  uint64_t bytes_ = 0;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_RECORD_REWRITER_H_
