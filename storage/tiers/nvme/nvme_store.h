#ifndef OPTSTATE_STORAGE_TIERS_NVME_NVME_STORE_H_
#define OPTSTATE_STORAGE_TIERS_NVME_NVME_STORE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/arrangement.h"
#include "storage/durable_commit.h"
#include "storage/io/io_engine.h"
#include "storage/record_rewrite.h"
#include "storage/state_store.h"
#include "storage/swap_sizes.h"
#include "storage/swap_state.h"
#include "storage/tiers/nvme/committer.h"
#include "storage/tiers/nvme/durable_log.h"
#include "storage/tiers/nvme/frame_checks.h"
#include "storage/tiers/nvme/io_thread.h"
#include "storage/tiers/nvme/nvme_options.h"
#include "storage/tiers/nvme/parameter_cache.h"
#include "storage/tiers/nvme/read_queue.h"
#include "storage/tiers/nvme/record_cache.h"
#include "storage/tiers/nvme/record_mover.h"
#include "storage/tiers/nvme/record_rewriter.h"
#include "storage/tiers/nvme/store_context.h"
#include "storage/tiers/nvme/store_monitor.h"
#include "storage/tiers/nvme/swapper.h"
#include "storage/tiers/nvme/verifier.h"
#include "storage/verify_result.h"

namespace optstate::nvme {

// The store of a job whose records are on disk, and in a bounded number of
// frames in memory. Frames and their table lie in files that outlive the
// engine.
//
// A record is read into a frame when it is wanted, updated there, and written
// to a slot on disk when its frame is wanted for another. A pass takes the
// records that are in frames first; while workers update one record, the next
// are being read and the last ones written.
//
// Durability: each record has two slots, of which the last durable commit names
// one; only the other one is written. A commit brings all records of its step
// to disk, syncs them, and only then names them. Stepping goes on meanwhile,
// but for the first change of each record that is not on disk yet.
//
// Errors: a read that fails, or whose checksum differs, fails the pin that
// wanted it (DATA_LOSS with file, offset and tile). A write or a sync that
// fails ends the store: all later calls return the error, what is durable
// stands, and memory holds what was not written.
//
// Rooms: RecordCache knows which record is in which frame, ReadQueue what is to
// be read, FrameChecks compares and takes checksums, Swapper reads and writes
// records, Committer makes steps durable, Verifier compares what is on disk,
// ParameterCache reads parameters alone, RecordMover moves records to other
// files; IoThread runs them. They share StoreContext (files and memory) and
// StoreMonitor (the lock).
//
// Threads: see StateStore; one thread of its own does all I/O.
// Size: the calls of StateStore, each forwarded to a room; what is left here
// takes the lock for several rooms at once.
class NvmeStore final : public storage::StateStore {
 public:
  using Options = NvmeOptions;
  using SizeOptions = NvmeSizeOptions;
  using Sizes = storage::SwapSizes;

  static constexpr uint64_t kFramesMin = storage::kSwapFramesMin;
  static constexpr uint8_t kReadAttemptsMax = kNvmeReadAttemptsMax;

  // Returns what a job takes.
  static Sizes SizesOf(const Layout& layout, uint64_t sub_group_elements,
                       const SizeOptions& options);

  // Makes the job's files on disk, or opens them. Removes what a former job of
  // the same name left, when the job is new.
  static absl::StatusOr<std::unique_ptr<NvmeStore>> Open(
      const Layout* layout, uint64_t sub_group_elements,
      const storage::StateMemory& memory, Options options);
  // Reads the newest durable commit of the job in these directories. NOT_FOUND:
  // there is none.
  static absl::StatusOr<storage::DurableCommit> ReadCommit(
      io::IoEngine* engine, absl::Span<const std::string> directories);
  ~NvmeStore() override;

  bool is_resident() const override { return false; }
  bool pins_at_once() const override;
  absl::Status status() const override;
  absl::StatusOr<size_t> BeginPass(absl::Span<const uint8_t> wanted) override;
  absl::StatusOr<Pin> PinOfPass(size_t position) override;

  bool has_disk() const override { return true; }
  bool is_durable() const override { return context_.options.is_durable; }
  absl::Status RequestCommit(uint64_t step, absl::string_view job) override;
  absl::Status AwaitCommit() override;
  uint64_t durable_step() const override;
  std::string durable_job() const override;
  absl::Status RestoreParameters() override;

  // Without a parameter area, reads from the record's frame, if it is in one,
  // else from the parameter cache.
  absl::Status ReadParameter(uint32_t parameter, uint64_t begin, uint64_t numel,
                             std::byte* out) override;
  void PrefetchParameters(uint32_t first, uint32_t count) override;
  void ReleaseParameters(uint32_t first, uint32_t count) override;

  absl::Status ChangeFrames(
      uint32_t frames,
      absl::FunctionRef<absl::Status(absl::Span<std::byte>*)> resize) override;

  absl::Status BeginMove(const storage::RewriteTarget& target) override;
  absl::Status CopyRecords() override;
  absl::StatusOr<uint64_t> FinishMove(
      absl::FunctionRef<absl::Status()> commit) override;
  void CancelMove(const absl::Status& why) override;
  void EndMove() override;
  absl::StatusOr<uint64_t> WriteAnew(
      const storage::RewriteTarget& target) override;
  std::optional<storage::RewriteState> rewriting() const override;
  void RemoveAnew(const storage::Arrangement& arrangement) override;

  // Verifies of a durable job the slots of the last durable commit, of another
  // those that are not older than memory. A damaged record that memory has as
  // it was written is to be written anew. Reads one record at a time, after all
  // other requests, and takes the memory of one frame.
  absl::StatusOr<storage::VerifyResult> Verify(
      absl::FunctionRef<bool(const storage::VerifyResult&)> progress) override;

  uint64_t waited_ns() const override;
  std::optional<storage::SwapState> swap_state() const override;

 private:
  absl::StatusOr<Pin> PinRecord(size_t sub_group, Access access) override;
  NvmeStore(const Layout* layout, uint64_t sub_group_elements,
            const storage::StateMemory& memory, Options options);

  // Waits until the record is in a frame and may be used in this way. Threads
  // that take the same record, one of them to overwrite it, may find zeros.
  absl::StatusOr<Pin> Take(uint32_t record, Access access, bool is_of_pass);
  void Unpin(const storage::RecordView& record, Access access) override;
  // Calls visit(record) for the records that have parts of parameters [first,
  // +count).
  void ForEachRecordOf(uint32_t first, uint32_t count,
                       absl::FunctionRef<void(uint32_t record)> visit) const;
  // Calls use(view) with a record that has its parameters.
  absl::Status ReadSection(uint32_t record, ParameterCache::Use use);
  bool WillBeWritten(uint32_t record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Writes again what StoreOpener::MarkUnsynced() returned.
  absl::Status RewriteUnsynced(absl::Span<const uint8_t> unsynced);
  // Brings the records of frames from `frames` on to disk; unless that fails,
  // they stay there until the cache is reset.
  absl::Status Vacate(uint32_t frames);
  // Opens the arrangement that the target's table is of.
  absl::Status Reopen(const storage::RewriteTarget& target);
  // Has the records written anew, and publishes how far that is.
  absl::Status Rewrite(RecordRewriter* rewriter);
  // Has no place name such a frame. INTERNAL: one has what the disk has not.
  absl::Status GiveUpFrames(uint32_t frames);

  StoreContext context_;
  mutable StoreMonitor monitor_;
  RecordCache cache_ ABSL_GUARDED_BY(monitor_.mu);
  ReadQueue queue_ ABSL_GUARDED_BY(monitor_.mu);
  FrameChecks checks_ ABSL_GUARDED_BY(monitor_.mu);
  Committer committer_;
  Verifier verifier_;
  ParameterCache parameters_;
  RecordMover mover_;
  Swapper swapper_ ABSL_GUARDED_BY(monitor_.mu);
  IoThread io_thread_;
  // The state of WriteAnew().
  std::optional<storage::RewriteState> rewriting_ ABSL_GUARDED_BY(monitor_.mu);
  std::chrono::steady_clock::time_point rewrite_began_at_
      ABSL_GUARDED_BY(monitor_.mu);
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_NVME_STORE_H_
