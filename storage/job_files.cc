#include "storage/job_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "storage/state_folder.h"

namespace optstate::storage {
namespace {

using StepFile = JobFiles::StepFile;

constexpr char kLoadLogFile[] = "load";
// The step files, by StepFile.
constexpr std::array<absl::string_view, JobFiles::kStepFileCount>
    kStepFileNames = {"speculation", "undo", "frames",
                      "frame_table", "redo", "gradient_log"};
// The order in which operators see them.
constexpr StepFile kShownOrder[] = {
    StepFile::kUndo,   StepFile::kSpeculation, StepFile::kRedo,
    StepFile::kFrames, StepFile::kFrameTable,  StepFile::kGradientLog};

size_t IndexOf(StepFile file) { return static_cast<size_t>(file); }

absl::string_view NameOf(StepFile file) {
  return kStepFileNames[IndexOf(file)];
}

std::array<uint64_t, JobFiles::kStepFileCount> ByFile(
    const StepFileBytes& bytes) {
  return {bytes.speculation, bytes.undo, bytes.frames,
          bytes.frame_table, bytes.redo, bytes.gradient_log};
}

ArraySet Owned() {
  ArraySet owned;
  for (int i = 0; i < kStateArrayCount; ++i) {
    owned.set(static_cast<size_t>(i),
              IsRecoveryArray(static_cast<StateArrayIndex>(i)));
  }
  return owned;
}

ArraySet WantedOf(const Layout& layout, Accumulation accumulation) {
  ArraySet wanted = Owned();
  for (int i = 0; i < kStateArrayCount; ++i) {
    const auto index = static_cast<size_t>(i);
    wanted.set(index,
               wanted.test(index) && HasArray(static_cast<StateArrayIndex>(i),
                                              layout, accumulation));
  }
  return wanted;
}

StepRecord RecordOfNewJob() {
  StepRecord record = {};
  record.clip_coefficient = 1;
  record.load_touched_from = kNoParameter;
  return record;
}

}  // namespace

JobFiles::JobFiles(std::string folder)
    : folder_(std::move(folder)), arrays_(folder_, Owned()) {}

std::string JobFiles::PathOf(absl::string_view file) const {
  return absl::StrCat(folder_, "/", file);
}

uint64_t JobFiles::BytesNeeded(const Layout& layout,
                               Accumulation accumulation) {
  return sizeof(ControlFile) +
         ArrayFiles::BytesNeeded(layout, WantedOf(layout, accumulation));
}

absl::StatusOr<CheckedFile> JobFiles::ReadDescription(
    const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kDescriptionFile);
  absl::StatusOr<CheckedFile> description = ReadCheckedFile(path);
  if (!absl::IsNotFound(description.status())) return description;
  struct stat folder_stat;
  if (::stat(folder.c_str(), &folder_stat) != 0 && errno == ENOENT) {
    return absl::NotFoundError(absl::StrCat("no job in ", folder));
  }
  // The folder is renamed into place with everything in it.
  return absl::DataLossError(absl::StrCat(path, " is missing"));
}

absl::StatusOr<JobFiles> JobFiles::Create(std::string folder,
                                          const Layout& layout,
                                          Accumulation accumulation,
                                          uint64_t incarnation) {
  JobFiles files(std::move(folder));
  const ByteRange whole = {0, sizeof(ControlFile)};
  OPTSTATE_ASSIGN_OR_RETURN(files.control_,
                            StateFile::Create(files.PathOf(kControlFileName),
                                              whole.end, {&whole, 1}));
  InitControlFile(incarnation, absl::ToUnixNanos(absl::Now()), RecordOfNewJob(),
                  files.control());
  OPTSTATE_RETURN_IF_ERROR(
      files.arrays_.Create(layout, WantedOf(layout, accumulation)));
  return files;
}

absl::StatusOr<JobFiles> JobFiles::Open(std::string folder,
                                        const Layout& layout,
                                        Accumulation accumulation,
                                        uint64_t incarnation) {
  JobFiles files(std::move(folder));
  const std::string path = files.PathOf(kControlFileName);
  const ByteRange whole = {0, sizeof(ControlFile)};
  OPTSTATE_ASSIGN_OR_RETURN(files.control_,
                            StateFile::Open(path, whole.end, {&whole, 1}));
  OPTSTATE_RETURN_IF_ERROR(
      Annotate(CheckControlFile(*files.control(), incarnation,
                                layout.parameters().size()),
               path));
  OPTSTATE_RETURN_IF_ERROR(
      files.arrays_.Open(layout, WantedOf(layout, accumulation)));
  return files;
}

absl::Status JobFiles::WriteDescription(const Layout& layout,
                                        const std::string& description) const {
  return WriteCheckedFile(PathOf(kDescriptionFile),
                          {layout.hash(), control()->incarnation, description});
}

JobFiles::Extents JobFiles::extents() const {
  Extents extents;
  extents.arrays = arrays_.extents();
  for (size_t i = 0; i < step_files_.size(); ++i) {
    extents.step_files[i] = step_file(static_cast<StepFile>(i)).size();
  }
  return extents;
}

absl::Status JobFiles::Resize(const Layout& layout, Accumulation accumulation,
                              const StepFileBytes& step_files) {
  OPTSTATE_RETURN_IF_ERROR(
      arrays_.Resize(layout, WantedOf(layout, accumulation)));
  return Reserve(step_files);
}

absl::Status JobFiles::Restore(const Extents& extents, const Layout& layout) {
  arrays_.Restore(extents.arrays, layout);
  // The size is noted before the file is shorter.
  control()->undo_bytes = extents.step_files[IndexOf(StepFile::kUndo)];
  absl::Status status;
  for (size_t i = 0; i < step_files_.size(); ++i) {
    status.Update(
        RestoreStepFile(static_cast<StepFile>(i), extents.step_files[i]));
  }
  return status;
}

absl::Status JobFiles::RestoreStepFile(StepFile which, uint64_t bytes) {
  std::optional<StateFile>& file = step_files_[IndexOf(which)];
  if (bytes == 0) {
    file.reset();
    ::unlink(PathOf(NameOf(which)).c_str());
    return absl::OkStatus();
  }
  if (file->size() <= bytes) return absl::OkStatus();
  const ByteRange whole = {0, bytes};
  return file->Resize(bytes, {&whole, 1});
}

void JobFiles::RemoveUnwanted(const Layout& layout, Accumulation accumulation) {
  arrays_.RemoveUnwanted(layout, WantedOf(layout, accumulation));
}

absl::Status JobFiles::Reserve(const StepFileBytes& bytes) {
  const auto by_file = ByFile(bytes);
  for (size_t i = 0; i < by_file.size(); ++i) {
    OPTSTATE_RETURN_IF_ERROR(Reserve(static_cast<StepFile>(i), by_file[i]));
  }
  return absl::OkStatus();
}

absl::Status JobFiles::Reserve(StepFile which, uint64_t bytes) {
  std::optional<StateFile>& file = step_files_[IndexOf(which)];
  const std::string path = PathOf(NameOf(which));
  if (!file.has_value()) {
    std::error_code error;
    uintmax_t found = std::filesystem::file_size(path, error);
    if (error == std::errc::no_such_file_or_directory) {
      found = 0;
    } else if (error) {
      return OsError(error.value(), absl::StrCat("stat ", path));
    }
    if (bytes == 0 && found == 0) return absl::OkStatus();
    // An empty file is what is left of a creation that a crash interrupted.
    if (!error && found == 0 && ::unlink(path.c_str()) != 0) {
      return OsError(errno, absl::StrCat("unlink ", path));
    }
    const ByteRange whole = {0, found == 0 ? bytes : found};
    OPTSTATE_ASSIGN_OR_RETURN(
        file, found == 0 ? StateFile::Create(path, whole.end, {&whole, 1})
                         : StateFile::Open(path, whole.end, {&whole, 1}));
  }
  if (file->size() < bytes) {
    const ByteRange whole = {0, bytes};
    OPTSTATE_RETURN_IF_ERROR(file->Resize(bytes, {&whole, 1}));
  }
  // The size is noted behind the file: a crash in between leaves one that is
  // larger than noted.
  if (which == StepFile::kUndo && bytes != 0) {
    control()->undo_bytes = file->size();
  }
  return absl::OkStatus();
}

absl::Status JobFiles::ReserveAhead(StepFile file, uint64_t bytes) const {
  return step_files_[IndexOf(file)]->ReserveAhead(bytes);
}

absl::Status JobFiles::Resize(StepFile file, uint64_t bytes) {
  const ByteRange whole = {0, bytes};
  return step_files_[IndexOf(file)]->Resize(bytes, {&whole, 1});
}

absl::Span<std::byte> JobFiles::step_file(StepFile which) const {
  const std::optional<StateFile>& file = step_files_[IndexOf(which)];
  if (!file.has_value()) return {};
  return absl::MakeSpan(file->data(), file->size());
}

void JobFiles::LockMemory(MemoryLocker* locker) {
  control_->LockMemory(locker);
  arrays_.LockMemory(locker);
  for (std::optional<StateFile>& file : step_files_) {
    if (file.has_value()) file->LockMemory(locker);
  }
}

absl::Status JobFiles::ReserveLoadLog(uint64_t bytes, uint64_t bytes_max) {
  if (load_log_.has_value()) return load_log_->ReserveTo(bytes);
  DropLoadLog();
  const std::string path = load_log_path();
  const ByteRange first = {0, bytes};
  absl::StatusOr<StateFile> file =
      StateFile::Create(path, std::max(bytes, bytes_max), {&first, 1});
  if (!file.ok()) {
    ::unlink(path.c_str());
    return file.status();
  }
  load_log_ = *std::move(file);
  return absl::OkStatus();
}

absl::Status JobFiles::OpenLoadLog(uint64_t bytes) {
  const ByteRange whole = {0, bytes};
  OPTSTATE_ASSIGN_OR_RETURN(
      load_log_, StateFile::Open(load_log_path(), bytes, {&whole, 1}));
  return absl::OkStatus();
}

void JobFiles::DropLoadLog() {
  load_log_.reset();
  ::unlink(PathOf(kLoadLogFile).c_str());
  ::unlink(load_log_path().c_str());
}

absl::Span<std::byte> JobFiles::load_log() const {
  if (!load_log_.has_value()) return {};
  return absl::MakeSpan(load_log_->data(), load_log_->reserved_bytes());
}

// A log that a former build began stays beside the other files.
std::string JobFiles::load_log_path() const {
  std::string beside = PathOf(kLoadLogFile);
  if (load_log_folder_.empty() || ::access(beside.c_str(), F_OK) == 0) {
    return beside;
  }
  return absl::StrCat(load_log_folder_, "/", kLoadLogFile);
}

RecoveryArrays JobFiles::recovery() const {
  const auto words = [this](StateArrayIndex array) {
    return reinterpret_cast<std::atomic<uint64_t>*>(arrays_.data(array));
  };
  RecoveryArrays arrays;
  arrays.run_stamps = words(kRunStampsArray);
  arrays.staged_marks = words(kStagedMarksArray);
  arrays.rank_marks =
      reinterpret_cast<RankMark*>(arrays_.data(kRankMarksArray));
  arrays.step_intent = arrays_.span(kStepIntentArray);
  return arrays;
}

void JobFiles::DescribeStepFiles(std::vector<ArrayInfo>* infos) const {
  const auto add = [infos](absl::string_view name, uint64_t bytes) {
    infos->push_back({std::string(name), std::string(name), "record", bytes});
  };
  for (const StepFile file : kShownOrder) {
    if (!step_files_[IndexOf(file)].has_value()) continue;
    add(NameOf(file), step_file(file).size());
  }
  if (load_log_.has_value()) add(kLoadLogFile, load_log_->reserved_bytes());
}

uint64_t JobFiles::bytes() const {
  uint64_t bytes = sizeof(ControlFile) + arrays_.bytes();
  for (const auto& file : step_files_) {
    if (file.has_value()) bytes += file->size();
  }
  if (load_log_.has_value() && !is_load_log_on_disk()) {
    bytes += load_log_->reserved_bytes();
  }
  return bytes;
}

}  // namespace optstate::storage
