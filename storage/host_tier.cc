#include "storage/host_tier.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "storage/state_array_table.h"
#include "storage/state_folder.h"

namespace optstate {
namespace {

constexpr char kUnfinishedFolder[] = "/state.tmp";
constexpr char kUndoFile[] = "undo";
constexpr char kSpeculationFile[] = "speculation";
constexpr char kRedoFile[] = "redo";
constexpr char kLoadLogFile[] = "load";
constexpr char kFramesFile[] = "frames";
constexpr char kFrameTableFile[] = "frame_table";

StateArrayIndex ArrayAt(int index) {
  return static_cast<StateArrayIndex>(index);
}

// Returns whether the job has the array in host memory.
bool Has(StateArrayIndex array, const Layout& layout,
         const HostArrays& arrays) {
  const bool is_of_records =
      array == kMasterArray || (array >= kState0Array && array <= kScale2Array);
  return (arrays.has_records || !is_of_records) &&
         HasArray(array, layout, arrays.accumulation);
}

absl::Status RemoveFolder(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (!error) return absl::OkStatus();
  return OsError(error.value(), absl::StrCat("remove ", path));
}

uint64_t NewIncarnation() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;  // never 0
}

StepRecord RecordOfNewJob() {
  StepRecord record = {};
  record.clip_coefficient = 1;
  record.load_touched_from = kNoParameter;
  return record;
}

// The files fit together only if they were made for this layout; the hash is
// computed anew from the description's payload by its parser.
absl::Status CheckHash(const CheckedFile& description, const Layout& layout) {
  if (description.layout_hash == layout.hash()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("job.binpb: layout hash is ",
                   absl::BytesToHexString(description.layout_hash),
                   ", its layout gives ", absl::BytesToHexString(layout.hash()),
                   ": written by another version of optstated?"));
}

}  // namespace

std::string HostTier::Path(absl::string_view file) const {
  return absl::StrCat(state_, "/", file);
}

uint64_t HostTier::BytesNeeded(const Layout& layout, const HostArrays& arrays) {
  uint64_t bytes = sizeof(ControlFile);
  for (int i = 0; i < kStateArrayCount; ++i) {
    if (!Has(ArrayAt(i), layout, arrays)) continue;
    for (const ByteRange& range : ReservedRanges(ArrayAt(i), layout)) {
      bytes += range.end - range.begin;
    }
  }
  return bytes;
}

absl::StatusOr<CheckedFile> HostTier::ReadDescription(
    const std::string& directory) {
  OPTSTATE_RETURN_IF_ERROR(RemoveFolder(directory + kUnfinishedFolder));
  const std::string folder = directory + kStateFolder;
  absl::StatusOr<CheckedFile> description =
      ReadCheckedFile(absl::StrCat(folder, "/", kDescriptionFile));
  if (!absl::IsNotFound(description.status())) return description;
  struct stat folder_stat;
  if (::stat(folder.c_str(), &folder_stat) != 0 && errno == ENOENT) {
    return absl::NotFoundError(absl::StrCat("no job in ", directory));
  }
  // The folder is renamed into place with everything in it.
  return absl::DataLossError(
      absl::StrCat(folder, "/", kDescriptionFile, " is missing"));
}

absl::StatusOr<HostTier> HostTier::Create(const std::string& directory,
                                          const Layout& layout,
                                          const HostArrays& arrays,
                                          const std::string& description,
                                          uint64_t incarnation) {
  const std::string unfinished = directory + kUnfinishedFolder;
  const std::string finished = directory + kStateFolder;
  OPTSTATE_RETURN_IF_ERROR(RemoveFolder(unfinished));
  if (::mkdir(unfinished.c_str(), 0700) != 0) {
    return OsError(errno, absl::StrCat("mkdir ", unfinished));
  }
  HostTier tier(unfinished);
  const CheckedFile file = {layout.hash(),
                            incarnation != 0 ? incarnation : NewIncarnation(),
                            description};
  absl::Status status = tier.CreateFiles(layout, arrays, file);
  if (status.ok() && ::rename(unfinished.c_str(), finished.c_str()) != 0) {
    status = OsError(errno, absl::StrCat("rename to ", finished));
  }
  if (!status.ok()) {
    RemoveFolder(unfinished).IgnoreError();  // removed at the next open at last
    return status;
  }
  // The paths within say state.tmp; opening again costs little and checks.
  tier = HostTier(finished);
  OPTSTATE_RETURN_IF_ERROR(tier.OpenFiles(layout, arrays, file.incarnation));
  return tier;
}

absl::Status HostTier::CreateFiles(const Layout& layout,
                                   const HostArrays& arrays,
                                   const CheckedFile& description) {
  const ByteRange whole = {0, sizeof(ControlFile)};
  OPTSTATE_ASSIGN_OR_RETURN(
      control_,
      StateFile::Create(Path(kControlFileName), whole.end, {&whole, 1}));
  InitControlFile(description.incarnation, absl::ToUnixNanos(absl::Now()),
                  RecordOfNewJob(), control());
  for (int i = 0; i < kStateArrayCount; ++i) {
    const StateArrayIndex array = ArrayAt(i);
    if (!Has(array, layout, arrays)) continue;
    OPTSTATE_ASSIGN_OR_RETURN(
        arrays_[i], StateFile::Create(Path(FileOf(array, layout).file),
                                      FileBytes(array, layout),
                                      ReservedRanges(array, layout)));
  }
  return WriteCheckedFile(Path(kDescriptionFile), description);
}

absl::Status HostTier::Remove(const std::string& directory) {
  return RemoveFolder(directory + kStateFolder);
}

absl::StatusOr<HostTier> HostTier::Open(const std::string& directory,
                                        const Layout& layout,
                                        const HostArrays& arrays,
                                        const CheckedFile& description) {
  OPTSTATE_RETURN_IF_ERROR(CheckHash(description, layout));
  HostTier tier(directory + kStateFolder);
  OPTSTATE_RETURN_IF_ERROR(
      tier.OpenFiles(layout, arrays, description.incarnation));
  return tier;
}

absl::Status HostTier::OpenFiles(const Layout& layout, const HostArrays& arrays,
                                 uint64_t incarnation) {
  const ByteRange whole = {0, sizeof(ControlFile)};
  OPTSTATE_ASSIGN_OR_RETURN(control_, StateFile::Open(Path(kControlFileName),
                                                      whole.end, {&whole, 1}));
  OPTSTATE_RETURN_IF_ERROR(Annotate(
      CheckControlFile(*control(), incarnation, layout.parameters().size()),
      Path(kControlFileName)));
  for (int i = 0; i < kStateArrayCount; ++i) {
    const StateArrayIndex array = ArrayAt(i);
    if (!Has(array, layout, arrays)) {
      // The file is of a reshape that did not get as far as its description, or
      // had not removed it yet.
      const std::string file = FileOf(array, layout).file;
      if (!file.empty()) ::unlink(Path(file).c_str());
      continue;
    }
    OPTSTATE_ASSIGN_OR_RETURN(arrays_[i],
                              StateFile::Open(Path(FileOf(array, layout).file),
                                              FileBytes(array, layout),
                                              ReservedRanges(array, layout)));
  }
  return absl::OkStatus();
}

absl::Status HostTier::ResizeFiles(const Layout& layout,
                                   const HostArrays& arrays) {
  for (int i = 0; i < kStateArrayCount; ++i) {
    const StateArrayIndex array = ArrayAt(i);
    if (!Has(array, layout, arrays)) continue;
    const uint64_t bytes = FileBytes(array, layout);
    const std::vector<ByteRange> reserved = ReservedRanges(array, layout);
    if (arrays_[i].has_value()) {
      OPTSTATE_RETURN_IF_ERROR(arrays_[i]->Resize(bytes, reserved));
      continue;
    }
    OPTSTATE_ASSIGN_OR_RETURN(
        arrays_[i],
        StateFile::Create(Path(FileOf(array, layout).file), bytes, reserved));
  }
  return absl::OkStatus();
}

absl::Status HostTier::Reshape(const Layout& layout, const HostArrays& arrays,
                               const StepFileBytes& step_files,
                               const std::string& description) {
  static_assert(kArrayCount == kStateArrayCount);
  const std::array<Extent, kArrayCount> before = Extents();
  const StepFileBytes step_files_before = {
      undo().size(), redo().size(), speculation().size(), frames().size(),
      frame_table().size()};
  absl::Status status = ResizeFiles(layout, arrays);
  if (status.ok()) status = ReserveStepFiles(step_files);
  if (status.ok()) {
    // The point of no return: from here on the new layout is the job's.
    status =
        WriteCheckedFile(Path(kDescriptionFile),
                         {layout.hash(), control()->incarnation, description});
  }
  if (!status.ok()) {
    for (int i = 0; i < kArrayCount; ++i) RestoreExtent(i, before[i], layout);
    const absl::Status restored = RestoreStepFiles(step_files_before);
    if (restored.ok()) return status;
    return absl::Status(status.code(),
                        absl::StrCat(status.message(),
                                     "; what it took before that stays taken: ",
                                     restored.message()));
  }
  for (int i = 0; i < kArrayCount; ++i) {
    if (!arrays_[i].has_value()) continue;
    if (!Has(ArrayAt(i), layout, arrays)) RestoreExtent(i, {}, layout);
  }
  return absl::OkStatus();
}

std::array<HostTier::Extent, HostTier::kArrayCount> HostTier::Extents() const {
  std::array<Extent, kArrayCount> extents;
  for (int i = 0; i < kArrayCount; ++i) {
    if (!arrays_[i].has_value()) continue;
    extents[i] = {arrays_[i]->size(), arrays_[i]->reserved()};
  }
  return extents;
}

void HostTier::RestoreExtent(int array, const Extent& extent,
                             const Layout& layout) {
  // A failure here is put right by the next Open.
  if (extent.bytes == 0) {
    arrays_[array].reset();
    ::unlink(Path(FileOf(ArrayAt(array), layout).file).c_str());
  } else if (arrays_[array]->size() > extent.bytes) {
    arrays_[array]->Resize(extent.bytes, extent.reserved).IgnoreError();
  }
}

std::unique_ptr<HostStore> HostTier::MakeStore(
    const Layout* layout, uint64_t sub_group_elements) const {
  return std::make_unique<HostStore>(layout, sub_group_elements, Arrays());
}

StateArrays HostTier::Arrays() const {
  const auto floats = [this](int array) {
    return arrays_[array].has_value()
               ? reinterpret_cast<float*>(arrays_[array]->data())
               : nullptr;
  };
  StateArrays arrays;
  arrays.parameters = arrays_[kParametersArray]->data();
  arrays.master = reinterpret_cast<std::byte*>(floats(kMasterArray));
  for (int k = 0; k < kStateArraysMax; ++k) {
    arrays.state[k] = reinterpret_cast<std::byte*>(floats(kState0Array + k));
    arrays.scale[k] = floats(kScale0Array + k);
  }
  arrays.accumulator = floats(kAccumulatorArray);
  arrays.gradient_accumulator =
      reinterpret_cast<std::byte*>(floats(kGradientAccumulatorArray));
  arrays.step_counts =
      reinterpret_cast<int64_t*>(arrays_[kStepCountsArray]->data());
  arrays.scalars = reinterpret_cast<double*>(floats(kScalarsArray));
  return arrays;
}

absl::StatusOr<UniqueFd> HostTier::OpenParameters() const {
  return OpenToRead(kParametersArray);
}

absl::StatusOr<UniqueFd> HostTier::OpenRunStamps() const {
  return OpenToRead(kRunStampsArray);
}

absl::StatusOr<UniqueFd> HostTier::OpenToRead(int array) const {
  const std::string& path = arrays_[static_cast<size_t>(array)]->path();
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  return fd;
}

absl::Status HostTier::ReserveStepFiles(const StepFileBytes& bytes) {
  OPTSTATE_RETURN_IF_ERROR(ReserveSpeculation(bytes.speculation));
  OPTSTATE_RETURN_IF_ERROR(ReserveUndo(bytes.undo));
  OPTSTATE_RETURN_IF_ERROR(ReserveFrames(bytes.frames));
  OPTSTATE_RETURN_IF_ERROR(ReserveFrameTable(bytes.frame_table));
  return ReserveRedo(bytes.redo);
}

// A file that stays too large takes memory, and is used by the next that needs
// it.
absl::Status HostTier::RestoreStepFiles(const StepFileBytes& bytes) {
  control()->undo_bytes = bytes.undo;  // before the file is shorter
  absl::Status status = RestoreFile(kUndoFile, bytes.undo, &undo_);
  status.Update(RestoreFile(kRedoFile, bytes.redo, &redo_));
  status.Update(
      RestoreFile(kSpeculationFile, bytes.speculation, &speculation_));
  return status;
}

absl::Status HostTier::RestoreFile(absl::string_view name, uint64_t bytes,
                                   std::optional<StateFile>* file) {
  if (bytes == 0) {
    file->reset();
    ::unlink(Path(name).c_str());
    return absl::OkStatus();
  }
  if ((*file)->size() <= bytes) return absl::OkStatus();
  const ByteRange whole = {0, bytes};
  return (*file)->Resize(bytes, {&whole, 1});
}

absl::Status HostTier::ReserveUndo(uint64_t bytes) {
  OPTSTATE_RETURN_IF_ERROR(ReserveFile(kUndoFile, bytes, &undo_));
  // The size is noted behind the file: a crash in between leaves one that is
  // larger than noted.
  if (bytes != 0) control()->undo_bytes = undo_->size();
  return absl::OkStatus();
}

absl::Status HostTier::ReserveRedo(uint64_t bytes) {
  return ReserveFile(kRedoFile, bytes, &redo_);
}

absl::Span<std::byte> HostTier::redo() const {
  if (!redo_.has_value()) return {};
  return absl::MakeSpan(redo_->data(), redo_->size());
}

absl::Status HostTier::ReserveSpeculation(uint64_t bytes) {
  return ReserveFile(kSpeculationFile, bytes, &speculation_);
}

absl::Status HostTier::ReserveFrames(uint64_t bytes) {
  return ReserveFile(kFramesFile, bytes, &frames_);
}

absl::Span<std::byte> HostTier::frames() const {
  if (!frames_.has_value()) return {};
  return absl::MakeSpan(frames_->data(), frames_->size());
}

absl::Status HostTier::ReserveFrameTable(uint64_t bytes) {
  return ReserveFile(kFrameTableFile, bytes, &frame_table_);
}

absl::Span<std::byte> HostTier::frame_table() const {
  if (!frame_table_.has_value()) return {};
  return absl::MakeSpan(frame_table_->data(), frame_table_->size());
}

absl::Status HostTier::ReserveFile(absl::string_view name, uint64_t bytes,
                                   std::optional<StateFile>* file) {
  const std::string path = Path(name);
  if (!file->has_value()) {
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
        *file, found == 0 ? StateFile::Create(path, whole.end, {&whole, 1})
                          : StateFile::Open(path, whole.end, {&whole, 1}));
  }
  if ((*file)->size() >= bytes) return absl::OkStatus();
  const ByteRange whole = {0, bytes};
  return (*file)->Resize(bytes, {&whole, 1});
}

absl::Span<std::byte> HostTier::undo() const {
  if (!undo_.has_value()) return {};
  return absl::MakeSpan(undo_->data(), undo_->size());
}

absl::Span<std::byte> HostTier::speculation() const {
  if (!speculation_.has_value()) return {};
  return absl::MakeSpan(speculation_->data(), speculation_->size());
}

absl::Status HostTier::ReserveLoadLog(uint64_t bytes, uint64_t bytes_max) {
  if (load_log_.has_value()) return load_log_->ReserveTo(bytes);
  const std::string path = load_log_path();
  ::unlink(path.c_str());
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

absl::Status HostTier::OpenLoadLog(uint64_t bytes) {
  const ByteRange whole = {0, bytes};
  OPTSTATE_ASSIGN_OR_RETURN(
      load_log_, StateFile::Open(load_log_path(), bytes, {&whole, 1}));
  return absl::OkStatus();
}

void HostTier::DropLoadLog() {
  load_log_.reset();
  ::unlink(load_log_path().c_str());
}

absl::Span<std::byte> HostTier::load_log() const {
  if (!load_log_.has_value()) return {};
  return absl::MakeSpan(load_log_->data(), load_log_->reserved_bytes());
}

std::string HostTier::load_log_path() const { return Path(kLoadLogFile); }

RecoveryArrays HostTier::recovery() const {
  const auto words = [this](StateArrayIndex array) {
    return arrays_[array].has_value()
               ? reinterpret_cast<std::atomic<uint64_t>*>(
                     arrays_[array]->data())
               : nullptr;
  };
  RecoveryArrays arrays;
  arrays.run_stamps = words(kRunStampsArray);
  arrays.staged_marks = words(kStagedMarksArray);
  arrays.rank_marks =
      reinterpret_cast<RankMark*>(arrays_[kRankMarksArray]->data());
  arrays.step_intent = absl::MakeSpan(arrays_[kStepIntentArray]->data(),
                                      arrays_[kStepIntentArray]->size());
  return arrays;
}

ControlFile* HostTier::control() const {
  return reinterpret_cast<ControlFile*>(control_->data());
}

std::vector<HostTier::ArrayInfo> HostTier::Describe(
    const Layout& layout) const {
  std::vector<ArrayInfo> infos;
  for (int i = 0; i < kStateArrayCount; ++i) {
    if (!arrays_[i].has_value()) continue;
    StateArrayFile file = FileOf(ArrayAt(i), layout);
    infos.push_back({std::move(file.name), std::move(file.file),
                     std::move(file.dtype), arrays_[i]->reserved_bytes()});
  }
  if (undo_.has_value())
    infos.push_back({"undo", kUndoFile, "record", undo_->size()});
  if (speculation_.has_value()) {
    infos.push_back(
        {"speculation", kSpeculationFile, "record", speculation_->size()});
  }
  if (redo_.has_value()) {
    infos.push_back({"redo", kRedoFile, "record", redo_->size()});
  }
  if (frames_.has_value()) {
    infos.push_back({"frames", kFramesFile, "record", frames_->size()});
  }
  if (frame_table_.has_value()) {
    infos.push_back(
        {"frame_table", kFrameTableFile, "record", frame_table_->size()});
  }
  if (load_log_.has_value()) {
    infos.push_back(
        {"load", kLoadLogFile, "record", load_log_->reserved_bytes()});
  }
  return infos;
}

uint64_t HostTier::bytes() const {
  uint64_t bytes = sizeof(ControlFile);
  for (const auto& array : arrays_) {
    if (array.has_value()) bytes += array->reserved_bytes();
  }
  if (undo_.has_value()) bytes += undo_->size();
  if (speculation_.has_value()) bytes += speculation_->size();
  if (redo_.has_value()) bytes += redo_->size();
  if (frames_.has_value()) bytes += frames_->size();
  if (frame_table_.has_value()) bytes += frame_table_->size();
  if (load_log_.has_value()) bytes += load_log_->reserved_bytes();
  return bytes;
}

}  // namespace optstate
