#ifndef OPTSTATE_STORAGE_TIERS_NVME_NVME_STORE_H_
#define OPTSTATE_STORAGE_TIERS_NVME_NVME_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "storage/io/io_engine.h"
#include "storage/state_store.h"
#include "storage/tiers/nvme/durable_log.h"
#include "storage/tiers/nvme/frame_list.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/record_files.h"
#include "storage/tiers/nvme/record_layout.h"

namespace optstate {

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
// Threads: see StateStore; one thread of its own does all I/O.
class NvmeStore final : public StateStore {
 public:
  struct Options {
    std::unique_ptr<io::IoEngine> engine;
    // The job's own directories, at least one; they exist.
    std::vector<std::string> directories;
    // FramesBytes() of at least kFramesMin frames, and TableBytes(); both
    // outlive this. A table of zeros: the job is new.
    absl::Span<std::byte> frames;
    absl::Span<std::byte> table;
    uint64_t incarnation = 0;
    bool is_durable = false;  // commits can be requested
    // The room of a commit for DurableCommit::job.
    uint64_t job_bytes = 0;
    // With a table of zeros: the commit at which the job goes on.
    const DurableCommit* restored = nullptr;
  };

  // With fewer frames, reading, updating and writing could not overlap.
  static constexpr uint64_t kFramesMin = 3;
  struct SizeOptions {
    bool is_durable = false;
    uint32_t directories = 1;
    uint64_t job_bytes = 0;  // see Options
  };
  // What a job takes, in bytes.
  struct Sizes {
    uint64_t frame = 0;
    uint64_t records = 0;  // how many there are
    uint64_t table = 0;
    uint64_t disk = 0;  // over all directories
  };
  static Sizes SizesOf(const Layout& layout, uint64_t sub_group_elements,
                       const SizeOptions& options);

  // Makes the job's files on disk, or opens them. Removes what a former job of
  // the same name left, when the job is new.
  static absl::StatusOr<std::unique_ptr<NvmeStore>> Open(
      const Layout* layout, uint64_t sub_group_elements,
      const StateArrays& arrays, Options options);
  // Reads the newest durable commit of the job in these directories. NOT_FOUND:
  // there is none.
  static absl::StatusOr<DurableCommit> ReadCommit(
      io::IoEngine* engine, absl::Span<const std::string> directories);
  ~NvmeStore() override;

  bool is_resident() const override { return false; }
  absl::StatusOr<Pin> PinSubGroup(size_t sub_group, Access access) override;
  absl::StatusOr<size_t> BeginPass(absl::Span<const uint8_t> wanted) override;
  absl::StatusOr<Pin> PinOfPass(size_t position) override;

  // Begins to make the job durable as it is now, which is after `step`; `job`
  // is what DurableCommit::job is to be. Waits for the commit before. No record
  // may be pinned for writing.
  absl::Status RequestCommit(uint64_t step, std::string job);
  // Waits until the commit that was requested last is durable.
  absl::Status AwaitCommit();
  // Returns the step of the last durable commit.
  uint64_t durable_step() const;
  // Reads all records and puts the parameters that they hold into the parameter
  // area, after a restart without memory.
  absl::Status RestoreParameters();

  struct Counters {
    uint64_t bytes_read = 0;
    uint64_t bytes_written = 0;
    uint64_t records_read = 0;
    uint64_t records_written = 0;
    uint64_t commits = 0;
  };
  Counters counters() const;
  const char* io_engine_name() const { return engine_->name(); }

 private:
  enum class FrameState : uint8_t {
    kFree,
    kReading,
    kLoaded,  // read, or to be zeroed, and not checked yet
    kReady,
  };
  struct Frame {
    FrameState state = FrameState::kFree;
    bool is_writing = false;
    bool is_fresh = false;     // kLoaded: nothing was read, it is to be zeroed
    bool is_checking = false;  // kLoaded: a thread is at it
    uint8_t attempts = 0;
    uint32_t slot = 0;  // that is being read or written
    uint32_t record = 0;
    io::IoRequest request;
  };
  struct Record {
    uint32_t pins = 0;
    uint32_t waiters = 0;  // threads in Take()
    // The frame that is being read for it, or has been and is not checked.
    uint32_t loaded_frame = RecordPlace::kNoFrame;
    bool is_pending = false;   // in the pass, and not taken yet
    bool is_demanded = false;  // some thread waits for it
    bool must_flush = false;   // part of the commit that is being made
    absl::Status error;        // of the last attempt to read it
  };
  enum class CommitPhase : uint8_t {
    kNone,
    kFlushing,
    kSyncing,
    kWriting,
    kSyncingLog,
  };
  static constexpr uint8_t kNoSlot = 2;

  NvmeStore(const Layout* layout, uint64_t sub_group_elements,
            const StateArrays& arrays, Options options);
  absl::Status OpenFiles(bool is_new, const DurableCommit* restored);
  FrameTable::Shape ShapeOf() const;
  void Adopt();
  absl::Status RewriteUnsynced();

  absl::StatusOr<Pin> Take(uint32_t record, Access access);
  void Unpin(const RecordView& record, Access access) override;
  absl::Status Check(uint32_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  RecordView ViewOf(uint32_t record, uint32_t frame);
  std::byte* FrameAt(uint32_t frame) const {
    return options_.frames.data() + frame * record_layout_.frame_bytes();
  }
  absl::Status Damaged(uint32_t record, uint32_t slot, int64_t tile) const;

  // On the thread of I/O.
  void Run();
  void Schedule() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReadDemanded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReadAhead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteBehind() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool StartRead(uint32_t record, bool is_demanded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SubmitRead(uint32_t frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void StartWrite(uint32_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MayBeWritten(uint32_t record, bool is_demanded) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint32_t TakeFrame(bool is_demanded) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MayBeGivenUp(uint32_t frame, bool is_demanded) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReleaseFrame(uint32_t frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void AdvanceCommit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void BeginSync() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteCommit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndCommit() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Complete(io::IoRequest* request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CompleteRead(uint32_t frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CompleteWrite(uint32_t frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CompleteCommitRequest(const io::IoRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fail(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Options options_;
  const std::unique_ptr<io::IoEngine> engine_;
  const RecordLayout record_layout_;
  const uint32_t slots_;
  FrameTable table_;
  std::vector<RecordFiles> files_;  // one, once the files are open
  std::unique_ptr<DurableLog> log_;

  mutable absl::Mutex mu_;
  absl::CondVar changed_;  // some record can be taken, or a commit is over
  absl::CondVar work_;     // the thread of I/O has something to do
  std::vector<Frame> frames_ ABSL_GUARDED_BY(mu_);
  std::vector<Record> records_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mu_);
  // Frames that nobody has pinned, the one used longest ago first.
  FrameList unpinned_ ABSL_GUARDED_BY(mu_);
  // Frames that are kLoaded and that no thread is checking, oldest first.
  FrameList loaded_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> demanded_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> pass_ ABSL_GUARDED_BY(mu_);
  size_t read_ahead_ ABSL_GUARDED_BY(mu_) = 0;  // position in the pass
  uint32_t writing_ ABSL_GUARDED_BY(mu_) = 0;   // frames
  bool has_work_ ABSL_GUARDED_BY(mu_) = false;
  bool is_polling_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool reads_parameters_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  // By record, the slot that the last durable commit names, or kNoSlot.
  std::vector<uint8_t> durable_slots_ ABSL_GUARDED_BY(mu_);
  uint64_t durable_step_ ABSL_GUARDED_BY(mu_) = 0;
  CommitPhase phase_ ABSL_GUARDED_BY(mu_) = CommitPhase::kNone;
  DurableCommit commit_ ABSL_GUARDED_BY(mu_);
  uint64_t flushes_left_ ABSL_GUARDED_BY(mu_) = 0;
  size_t syncs_left_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<io::IoRequest> syncs_ ABSL_GUARDED_BY(mu_);  // by directory
  io::IoRequest sync_of_log_ ABSL_GUARDED_BY(mu_);
  Counters counters_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;
};

}  // namespace optstate

#endif  // OPTSTATE_STORAGE_TIERS_NVME_NVME_STORE_H_
