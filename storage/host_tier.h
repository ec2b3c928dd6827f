#ifndef OPTSTATE_STORAGE_HOST_TIER_H_
#define OPTSTATE_STORAGE_HOST_TIER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/unique_fd.h"
#include "storage/array_files.h"
#include "storage/format/checked_file.h"
#include "storage/format/control_file.h"
#include "storage/host_arrays.h"
#include "storage/job_files.h"
#include "storage/memory/memory_locker.h"
#include "storage/state_store.h"
#include "storage/tiers/host_store.h"

namespace optstate::storage {

// A job's state in host memory: files under DIRECTORY/state that outlive the
// process. It owns the job's files (JobFiles) and the arrays of the state
// (HostArrayFiles), and makes both appear, change and go together. Their bytes:
// format/FORMAT.md; what survives what: README.md.
//
// A set of files appears whole: it is made as DIRECTORY/state.tmp and renamed,
// so a crash before that leaves nothing that counts.
//
// Units: elements of the flat space; sizes in bytes where the name says so.
// Threads: not thread-safe; the arrays may be written by many at once.
// Lifetime: stores are valid until Reshape or destruction. Destroying it keeps
// the files. One HostTier per directory on the whole machine: the engine holds
// the job's lock.
// Size: it forwards the calls of its two owners of files.
class HostTier {
 public:
  using ArrayInfo = storage::ArrayInfo;
  using StepFileBytes = storage::StepFileBytes;

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

  // Gives the job a layout that extends the present one, with or without
  // accumulators, another description, and room in these files. All or nothing,
  // also when the process dies within.
  absl::Status Reshape(const Layout& layout, const HostArrays& arrays,
                       const StepFileBytes& step_files,
                       const std::string& description);

  // The job's files beside the arrays of its state.
  JobFiles& files() { return files_; }
  const JobFiles& files() const { return files_; }

  // Has the locker lock all that is mapped now; see JobFiles. The locker
  // outlives this.
  void LockMemory(MemoryLocker* locker) {
    files_.LockMemory(locker);
    arrays_.LockMemory(locker);
  }

  // Makes the store of records that all lie in memory; `layout` is the present
  // one, which outlives it.
  std::unique_ptr<HostStore> MakeStore(const Layout* layout,
                                       uint64_t sub_group_elements) const;
  // Returns the arrays that lie in memory, for the store of records that do
  // not.
  StateMemory Memory() const { return arrays_.addresses(); }
  // See HostArrayFiles.
  absl::StatusOr<UniqueFd> OpenParameters() const {
    return arrays_.OpenParameters();
  }
  // Returns every array with the bytes that it takes. `layout`: the present
  // one.
  std::vector<ArrayInfo> Describe(const Layout& layout) const;
  uint64_t bytes() const { return files_.bytes() + arrays_.bytes(); }

  // Calls of files(), by the names that sessions use; see JobFiles.
  absl::Status ReserveStepFiles(const StepFileBytes& bytes) {
    return files_.Reserve(bytes);
  }
  absl::Status ReserveUndo(uint64_t bytes) {
    return files_.Reserve(JobFiles::StepFile::kUndo, bytes);
  }
  absl::Span<std::byte> undo() const {
    return files_.step_file(JobFiles::StepFile::kUndo);
  }
  absl::Status ReserveRedo(uint64_t bytes) {
    return files_.Reserve(JobFiles::StepFile::kRedo, bytes);
  }
  absl::Span<std::byte> redo() const {
    return files_.step_file(JobFiles::StepFile::kRedo);
  }
  absl::Status ReserveSpeculation(uint64_t bytes) {
    return files_.Reserve(JobFiles::StepFile::kSpeculation, bytes);
  }
  absl::Span<std::byte> speculation() const {
    return files_.step_file(JobFiles::StepFile::kSpeculation);
  }
  absl::Status ReserveFrames(uint64_t bytes) {
    return files_.Reserve(JobFiles::StepFile::kFrames, bytes);
  }
  absl::Span<std::byte> frames() const {
    return files_.step_file(JobFiles::StepFile::kFrames);
  }
  absl::Status ReserveFramesAhead(uint64_t bytes) const {
    return files_.ReserveAhead(JobFiles::StepFile::kFrames, bytes);
  }
  absl::Status ResizeFrames(uint64_t bytes) {
    return files_.Resize(JobFiles::StepFile::kFrames, bytes);
  }
  absl::Status ReserveFrameTable(uint64_t bytes) {
    return files_.Reserve(JobFiles::StepFile::kFrameTable, bytes);
  }
  absl::Span<std::byte> frame_table() const {
    return files_.step_file(JobFiles::StepFile::kFrameTable);
  }
  absl::Status ReserveGradientLog(uint64_t bytes) {
    return files_.Reserve(JobFiles::StepFile::kGradientLog, bytes);
  }
  absl::Status ResizeGradientLog(uint64_t bytes) {
    return files_.Resize(JobFiles::StepFile::kGradientLog, bytes);
  }
  absl::Span<std::byte> gradient_log() const {
    return files_.step_file(JobFiles::StepFile::kGradientLog);
  }
  absl::Status ReserveLoadLog(uint64_t bytes, uint64_t bytes_max) {
    return files_.ReserveLoadLog(bytes, bytes_max);
  }
  void SetLoadLogFolder(std::string folder) {
    files_.SetLoadLogFolder(std::move(folder));
  }
  bool is_load_log_on_disk() const { return files_.is_load_log_on_disk(); }
  absl::Status OpenLoadLog(uint64_t bytes) { return files_.OpenLoadLog(bytes); }
  void DropLoadLog() { files_.DropLoadLog(); }
  absl::Span<std::byte> load_log() const { return files_.load_log(); }
  std::string load_log_path() const { return files_.load_log_path(); }
  absl::StatusOr<UniqueFd> OpenRunStamps() const {
    return files_.OpenRunStamps();
  }
  RecoveryArrays recovery() const { return files_.recovery(); }
  ControlFile* control() const { return files_.control(); }

 private:
  HostTier(JobFiles files, HostArrayFiles arrays)
      : files_(std::move(files)), arrays_(std::move(arrays)) {}
  static absl::Status CreateFiles(const std::string& folder,
                                  const Layout& layout,
                                  const HostArrays& arrays,
                                  const std::string& description,
                                  uint64_t incarnation);
  static absl::StatusOr<HostTier> OpenFiles(const std::string& folder,
                                            const Layout& layout,
                                            const HostArrays& arrays,
                                            uint64_t incarnation);

  JobFiles files_;
  HostArrayFiles arrays_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_HOST_TIER_H_
