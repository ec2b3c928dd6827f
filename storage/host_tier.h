#ifndef OPTSTATE_STORAGE_HOST_TIER_H_
#define OPTSTATE_STORAGE_HOST_TIER_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "proto/types/unique_fd.h"
#include "storage/format/checked_file.h"
#include "storage/format/control_file.h"
#include "storage/format/rank_mark.h"
#include "storage/state_file.h"
#include "storage/tiers/host_store.h"

namespace optstate {

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

// Which arrays of a job lie in host memory.
struct HostArrays {
  // NOLINTNEXTLINE(google-explicit-constructor): most jobs have all records.
  HostArrays(Accumulation accumulates, bool has = true)
      : accumulation(accumulates), has_records(has) {}

  Accumulation accumulation;
  // Masters, state arrays and scales; false: records are swapped.
  bool has_records = true;
};

// A job's state in host memory: files under DIRECTORY/state that outlive the
// process. Their bytes: format/FORMAT.md; what survives what: README.md.
//
// A set of files appears whole: it is made as DIRECTORY/state.tmp and renamed,
// so a crash before that leaves nothing that counts.
//
// Units: elements of the flat space; sizes in bytes where the name says so.
// Threads: not thread-safe; the arrays may be written by many at once.
// Lifetime: stores are valid until Reshape or destruction. Destroying it keeps
// the files. One HostTier per directory on the whole machine: the engine holds
// the job's lock.
class HostTier {
 public:
  struct ArrayInfo {
    std::string name;
    std::string file;  // within the state folder
    std::string dtype;
    uint64_t bytes = 0;
  };

  // Returns the bytes of all files of a job with this layout.
  static uint64_t BytesNeeded(const Layout& layout, const HostArrays& arrays);

  // Reads the job's description (job.binpb). NOT_FOUND when the directory holds
  // no job; DATA_LOSS when it is damaged. Removes a set that was never
  // finished.
  static absl::StatusOr<CheckedFile> ReadDescription(
      const std::string& directory);

  // Creates a new job, all zeros, every parameter to be loaded.
  // RESOURCE_EXHAUSTED when the file system cannot hold it; then nothing is
  // left behind. `incarnation` is drawn when it is 0.
  static absl::StatusOr<HostTier> Create(const std::string& directory,
                                         const Layout& layout,
                                         const HostArrays& arrays,
                                         const std::string& description,
                                         uint64_t incarnation = 0);

  // Removes the state of a job, if there is any.
  static absl::Status Remove(const std::string& directory);

  // Opens the job that is there. DATA_LOSS, naming the file, when one is
  // missing, too short or does not belong to `description`.
  static absl::StatusOr<HostTier> Open(const std::string& directory,
                                       const Layout& layout,
                                       const HostArrays& arrays,
                                       const CheckedFile& description);

  HostTier(HostTier&&) = default;
  HostTier& operator=(HostTier&&) = default;

  // The least bytes of the files beside the arrays; 0: need not be there.
  struct StepFileBytes {
    uint64_t undo = 0;
    uint64_t redo = 0;
    uint64_t speculation = 0;
    // These two are for jobs with records on disk: see NvmeStore.
    uint64_t frames = 0;
    uint64_t frame_table = 0;
  };

  // Gives the job a layout that extends the present one, with or without
  // accumulators, another description, and room in these files. All or nothing,
  // also when the process dies within.
  absl::Status Reshape(const Layout& layout, const HostArrays& arrays,
                       const StepFileBytes& step_files,
                       const std::string& description);
  // Calls the Reserve functions of the present job's files.
  absl::Status ReserveStepFiles(const StepFileBytes& bytes);

  // Makes the file of the workers' undo slots at least this large, keeping what
  // is in it, and notes its size in the control file; 0: only opens a file that
  // is there, and changes nothing. RESOURCE_EXHAUSTED when the file system
  // cannot hold it.
  absl::Status ReserveUndo(uint64_t bytes);
  // Returns the undo file; empty before ReserveUndo, or when there is none.
  absl::Span<std::byte> undo() const;
  // ReserveUndo() for the file of new values that are complete and not in
  // place.
  absl::Status ReserveRedo(uint64_t bytes);
  absl::Span<std::byte> redo() const;
  // ReserveUndo() for the file of what speculation has overwritten.
  absl::Status ReserveSpeculation(uint64_t bytes);
  absl::Span<std::byte> speculation() const;

  // ReserveUndo() for the frames of swapped records, and for their table.
  absl::Status ReserveFrames(uint64_t bytes);
  absl::Span<std::byte> frames() const;
  absl::Status ReserveFrameTable(uint64_t bytes);
  absl::Span<std::byte> frame_table() const;

  // Gives the file of what a load brings room for so many bytes, of `bytes_max`
  // that it can have; makes the file, in place of any that is there, when it is
  // not open. load_log() then stays where it is. RESOURCE_EXHAUSTED: nothing
  // changed.
  absl::Status ReserveLoadLog(uint64_t bytes, uint64_t bytes_max);
  // Opens the file that an engine has left, of so many bytes: DATA_LOSS when
  // the file is missing or shorter.
  absl::Status OpenLoadLog(uint64_t bytes);
  // Removes the file, open or not.
  void DropLoadLog();
  // Returns the room of the file; empty when it is not open.
  absl::Span<std::byte> load_log() const;
  // Returns the path of the file, also when there is none.
  std::string load_log_path() const;

  // Opens the file of StateArrays::parameters, for ranks to map: it cannot be
  // written through this fd. The file has whole pages, none of them a hole.
  absl::StatusOr<UniqueFd> OpenParameters() const;
  // OpenParameters() for RecoveryArrays::run_stamps.
  absl::StatusOr<UniqueFd> OpenRunStamps() const;

  RecoveryArrays recovery() const;
  // Returns the arrays that lie in memory.
  StateArrays Arrays() const;
  // Makes the store of records that all lie in memory; `layout` is the present
  // one, which outlives it.
  std::unique_ptr<HostStore> MakeStore(const Layout* layout,
                                       uint64_t sub_group_elements) const;
  ControlFile* control() const;
  // Returns every array with the bytes that it takes. `layout`: the present
  // one.
  std::vector<ArrayInfo> Describe(const Layout& layout) const;
  uint64_t bytes() const;

 private:
  static constexpr int kArrayCount = 16;  // kStateArrayCount

  // The extent of an array; 0 bytes: no file.
  struct Extent {
    uint64_t bytes = 0;
    std::vector<ByteRange> reserved;
  };

  explicit HostTier(std::string directory) : state_(std::move(directory)) {}
  absl::Status CreateFiles(const Layout& layout, const HostArrays& arrays,
                           const CheckedFile& description);
  absl::Status OpenFiles(const Layout& layout, const HostArrays& arrays,
                         uint64_t incarnation);
  absl::Status ResizeFiles(const Layout& layout, const HostArrays& arrays);
  std::array<Extent, kArrayCount> Extents() const;
  absl::Status ReserveFile(absl::string_view name, uint64_t bytes,
                           std::optional<StateFile>* file);
  absl::Status RestoreStepFiles(const StepFileBytes& bytes);
  absl::Status RestoreFile(absl::string_view name, uint64_t bytes,
                           std::optional<StateFile>* file);
  void RestoreExtent(int array, const Extent& extent, const Layout& layout);
  std::string Path(absl::string_view file) const;
  absl::StatusOr<UniqueFd> OpenToRead(int array) const;

  std::string state_;  // DIRECTORY/state
  std::optional<StateFile> control_;
  std::optional<StateFile> undo_;
  std::optional<StateFile> speculation_;
  std::optional<StateFile> redo_;
  std::optional<StateFile> load_log_;
  std::optional<StateFile> frames_;
  std::optional<StateFile> frame_table_;
  std::array<std::optional<StateFile>, kArrayCount> arrays_;
};

}  // namespace optstate

#endif  // OPTSTATE_STORAGE_HOST_TIER_H_
