#ifndef OPTSTATE_STORAGE_JOB_FILES_H_
#define OPTSTATE_STORAGE_JOB_FILES_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "proto/types/unique_fd.h"
#include "storage/array_files.h"
#include "storage/format/checked_file.h"
#include "storage/format/control_file.h"
#include "storage/format/rank_mark.h"
#include "storage/memory/memory_locker.h"
#include "storage/state_file.h"

namespace optstate::storage {

// The arrays that a restarted engine needs to finish the step that it died in;
// see format/FORMAT.md.
struct RecoveryArrays {
  // The last step, by run, whose update the run has.
  std::atomic<uint64_t>* run_stamps = nullptr;
  // The last push, by run, that its accumulator has; null without accumulation.
  std::atomic<uint64_t>* staged_marks = nullptr;
  RankMark* rank_marks = nullptr;  // by rank
  absl::Span<std::byte> step_intent;
};

// The least bytes of the files beside the arrays; 0: need not be there.
struct StepFileBytes {
  uint64_t undo = 0;
  uint64_t redo = 0;
  uint64_t speculation = 0;
  // These two are for jobs with records on disk: see NvmeStore.
  uint64_t frames = 0;
  uint64_t frame_table = 0;
  // For jobs with records that stay on devices: see GradientLog.
  uint64_t gradient_log = 0;
};

// The files that say what a job is, where it is, and what a restarted engine
// needs to go on: all of the state folder but the state itself. Their bytes:
// format/FORMAT.md.
//
// Threads: not thread-safe; what is in the files may be written by many at
// once.
// Lifetime: addresses are valid until a call that resizes their file.
// Destroying it keeps the files.
// Size: a pair of methods, reserve and read, for each file.
class JobFiles {
 public:
  // Files that steps need. Each is made when it is first reserved.
  enum class StepFile : uint8_t {
    kSpeculation,  // the values that speculation has overwritten
    kUndo,         // the workers' undo slots
    kFrames,       // the frames of swapped records
    kFrameTable,   // where each swapped record is
    kRedo,         // new values that are complete and not in place
    kGradientLog,  // the gradients of steps that records in memory lack
  };
  static constexpr int kStepFileCount = 6;

  // Returns the bytes of control and the arrays that recovery needs.
  static uint64_t BytesNeeded(const Layout& layout, Accumulation accumulation);

  // Reads the description (job.binpb) of the job in this state folder.
  // NOT_FOUND: there is no folder; DATA_LOSS: the file is damaged or missing.
  static absl::StatusOr<CheckedFile> ReadDescription(const std::string& folder);
  // Makes the files of a new job in an empty folder, with every parameter to be
  // loaded, but for the description.
  static absl::StatusOr<JobFiles> Create(std::string folder,
                                         const Layout& layout,
                                         Accumulation accumulation,
                                         uint64_t incarnation);
  // Opens what Create() made. DATA_LOSS, naming the file: one is missing, too
  // short or does not belong to the job.
  static absl::StatusOr<JobFiles> Open(std::string folder, const Layout& layout,
                                       Accumulation accumulation,
                                       uint64_t incarnation);

  // Replaces the description.
  absl::Status WriteDescription(const Layout& layout,
                                const std::string& description) const;

  // The sizes to which Restore() brings the files back.
  struct Extents {
    ArrayFiles::Extents arrays;
    std::array<uint64_t, kStepFileCount> step_files = {};
  };
  Extents extents() const;
  // Gives the arrays the sizes of another layout, and the step files at least
  // these.
  absl::Status Resize(const Layout& layout, Accumulation accumulation,
                      const StepFileBytes& step_files);
  // Brings the files back after a Resize() that failed, or whose layout will
  // not be the job's. `layout`: that of the Resize(). Returns the error of a
  // step file that stays too large, which takes memory and is used by the next
  // that needs it.
  absl::Status Restore(const Extents& extents, const Layout& layout);
  // Removes the arrays that a job with this layout does not have.
  void RemoveUnwanted(const Layout& layout, Accumulation accumulation);

  // Makes the file at least this large, keeping what is in it; 0: only opens a
  // file that is there, and changes nothing. RESOURCE_EXHAUSTED when the file
  // system cannot hold it. The size of kUndo is noted in the control file.
  absl::Status Reserve(StepFile file, uint64_t bytes);
  absl::Status Reserve(const StepFileBytes& bytes);
  // Reserves so many bytes for a file that is there and is smaller, whose size
  // and mapping stay as they are: Resize() then takes a moment. On an error,
  // and until then, the file on its file system may be larger.
  absl::Status ReserveAhead(StepFile file, uint64_t bytes) const;
  // Gives a file that is there this size, larger or smaller. On an error it is
  // as before, but may lie elsewhere.
  absl::Status Resize(StepFile file, uint64_t bytes);
  // Has this file, which MakeNextFrameTable() made, be kFrameTable.
  void UseFrameTable(StateFile file) {
    step_files_[static_cast<size_t>(StepFile::kFrameTable)] = std::move(file);
  }
  // Returns the file's bytes; empty before Reserve(), or when there is none.
  absl::Span<std::byte> step_file(StepFile file) const;

  // Has the locker lock all that is mapped now, but for the load log, which
  // lasts as long as a load. A file whose mapping a call replaces is locked no
  // more.
  void LockMemory(MemoryLocker* locker);

  // Gives the file of what a load brings room for so many bytes, of `bytes_max`
  // that it can have; makes the file, in place of any that is there, when it is
  // not open. load_log() then stays where it is. RESOURCE_EXHAUSTED: nothing
  // changed.
  absl::Status ReserveLoadLog(uint64_t bytes, uint64_t bytes_max);
  // Puts logs that are begun from now on into this folder, of a disk; empty:
  // beside the other files.
  void SetLoadLogFolder(std::string folder) {
    load_log_folder_ = std::move(folder);
  }
  // Returns whether logs take room on a disk, not memory.
  bool is_load_log_on_disk() const { return !load_log_folder_.empty(); }
  // Opens the file that an engine has left, of so many bytes: DATA_LOSS when
  // the file is missing or shorter.
  absl::Status OpenLoadLog(uint64_t bytes);
  // Removes the file, open or not.
  void DropLoadLog();
  // Returns the room of the file; empty when it is not open.
  absl::Span<std::byte> load_log() const;
  // Returns the path of the file, also when there is none.
  std::string load_log_path() const;

  // Opens the file of RecoveryArrays::run_stamps, for ranks to map: it cannot
  // be written through this fd.
  absl::StatusOr<UniqueFd> OpenRunStamps() const {
    return arrays_.OpenToRead(kRunStampsArray);
  }
  RecoveryArrays recovery() const;
  ControlFile* control() const {
    return reinterpret_cast<ControlFile*>(control_->data());
  }
  std::optional<ArrayInfo> Describe(StateArrayIndex array,
                                    const Layout& layout) const {
    return arrays_.Describe(array, layout);
  }
  // Appends descriptions of the step files and the load log to `infos`.
  void DescribeStepFiles(std::vector<ArrayInfo>* infos) const;
  // Returns the bytes that all files take, without the description.
  uint64_t bytes() const;

 private:
  explicit JobFiles(std::string folder);
  std::string PathOf(absl::string_view file) const;
  absl::Status RestoreStepFile(StepFile file, uint64_t bytes);

  std::string folder_;
  std::optional<StateFile> control_;
  ArrayFiles arrays_;
  std::array<std::optional<StateFile>, kStepFileCount> step_files_;
  std::optional<StateFile> load_log_;
  std::string load_log_folder_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_JOB_FILES_H_
