#ifndef OPTSTATE_STORAGE_TIERS_NVME_VERIFIER_H_
#define OPTSTATE_STORAGE_TIERS_NVME_VERIFIER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/io/io_engine.h"
#include "storage/tiers/nvme/committer.h"
#include "storage/tiers/nvme/record_cache.h"
#include "storage/tiers/nvme/store_context.h"
#include "storage/tiers/nvme/store_monitor.h"
#include "storage/verify_result.h"

namespace optstate::nvme {

// Compares what is on disk with its checksums, while the store is used.
//
// The thread that calls Verify() asks for one record after the other, and
// compares it; the thread of I/O reads it, after all other requests.
//
// Invariants:
// - A slot that is being read is not written (IsReading()).
// - While it is suspended, the thread in Verify() uses nothing that is changed
//   when the store's files are opened anew.
//
// Threads: Verify(), Suspend() and Resume() take the store's lock; it is held
// for all else.
class Verifier {
 public:
  // The arguments must outlive this object.
  Verifier(const StoreContext* context, StoreMonitor* monitor,
           RecordCache* cache, const Committer* committer)
      : context_(*context),
        monitor_(*monitor),
        cache_(*cache),
        committer_(*committer) {}

  // See NvmeStore::Verify().
  absl::StatusOr<storage::VerifyResult> Verify(
      absl::FunctionRef<bool(const storage::VerifyResult&)> progress);

  // Has no record be read or compared until Resume(). Waits for the record that
  // is being read or compared, and for no caller of Verify(). The thread of I/O
  // runs.
  void Suspend();
  void Resume();

  // Begins the read that Verify() wants, unless the slot is being written: then
  // it is begun after that.
  void Start();
  // Says whether the request is the verifier's.
  bool Owns(const io::IoRequest* request) const;
  // Goes on after the verifier's request.
  void Complete();
  // Says whether this slot is being read, so that it must not be written.
  bool IsReading(uint32_t record, uint32_t slot) const;

 private:
  // The read of one record for Verify(), which owns it.
  struct Verification {
    // kDone: the thread in Verify() is at it; kIdle: it looks at no record.
    enum class Phase : uint8_t { kIdle, kWanted, kReading, kDone, kSkipped };
    Phase phase = Phase::kIdle;
    uint32_t record = 0;
    uint32_t slot = 0;
    uint8_t attempts = 0;
    std::vector<uint32_t> sums;  // what the record must have
    absl::Span<std::byte> buffer;
    io::IoRequest request;
  };

  absl::Status VerifyRecord(uint32_t record, Verification* verification,
                            storage::VerifyResult* result);
  void NoteDamage(const Verification& verification, int64_t tile,
                  storage::VerifyResult* result) const;
  void Submit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Says whether a record is being read or compared.
  bool IsAtRecord() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);

  const StoreContext& context_;
  StoreMonitor& monitor_;
  RecordCache& cache_ ABSL_GUARDED_BY(monitor_.mu);
  const Committer& committer_;
  Verification* verification_ ABSL_GUARDED_BY(monitor_.mu) = nullptr;
  bool is_suspended_ ABSL_GUARDED_BY(monitor_.mu) = false;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_VERIFIER_H_
