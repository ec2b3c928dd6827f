#include "storage/tiers/nvme/record_files.h"

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/record_split.h"

namespace optstate::nvme {
namespace {

// Two arrangements are there at once at most, and they take turns.
std::string PathIn(const std::string& directory, uint32_t arrangement) {
  return absl::StrCat(directory,
                      arrangement % 2 == 0 ? "/records" : "/records.1");
}

bool IsOnDevice(const RecordFiles::Shape& shape, size_t directory) {
  return directory < shape.extents.size() &&
         !shape.extents[directory].device.empty();
}

}  // namespace

RecordFiles::RecordFiles(const RecordLayout& layout, const Shape& shape)
    : file_bytes_(shape.directories.size(), 0),
      split_(storage::SplitRecords(shape.records, shape.directories.size(),
                                   shape.weights)) {
  std::vector<uint64_t> begins(shape.directories.size(), 0);
  for (size_t i = 0; i < shape.directories.size(); ++i) {
    const bool is_device = IsOnDevice(shape, i);
    paths_.push_back(is_device
                         ? shape.extents[i].device
                         : PathIn(shape.directories[i], shape.arrangement));
    if (is_device) begins[i] = shape.extents[i].extent.begin_bytes;
  }
  offsets_.reserve(shape.records);
  slot_bytes_.reserve(shape.records);
  for (uint32_t record = 0; record < shape.records; ++record) {
    uint64_t& end = file_bytes_[split_[record]];
    offsets_.push_back(begins[split_[record]] + end);
    slot_bytes_.push_back(layout.bytes(record));
    end += shape.slots * layout.bytes(record);
  }
  // A file cannot be reserved empty.
  for (uint64_t& bytes : file_bytes_) {
    if (bytes == 0) bytes = io::kSectorBytes;
  }
}

std::vector<uint64_t> RecordFiles::BytesNeeded(
    const RecordLayout& layout, uint32_t directories,
    absl::Span<const uint32_t> weights, uint32_t records, uint32_t slots) {
  const std::vector<std::string> unnamed(directories);
  return RecordFiles(layout, {unnamed, weights, records, slots}).file_bytes_;
}

absl::StatusOr<io::FileId> RecordFiles::OpenExtent(
    io::IoEngine* engine, const std::string& directory,
    const storage::DeviceExtent& extent, uint64_t bytes) const {
  if (extent.extent.bytes < bytes) {
    return absl::DataLossError(absl::StrCat(
        directory, ": the job's extent of ", extent.device, " has ",
        extent.extent.bytes, " bytes, its records need ", bytes));
  }
  return engine->OpenExtent(extent.device, extent.extent);
}

absl::StatusOr<RecordFiles> RecordFiles::Create(io::IoEngine* engine,
                                                const RecordLayout& layout,
                                                const Shape& shape) {
  RecordFiles files(layout, shape);
  for (size_t i = 0; i < shape.directories.size(); ++i) {
    const absl::StatusOr<io::FileId> file =
        IsOnDevice(shape, i)
            ? files.OpenExtent(engine, shape.directories[i], shape.extents[i],
                               files.file_bytes_[i])
            : engine->Open(files.paths_[i], files.file_bytes_[i],
                           io::IoEngine::OpenMode::kCreate);
    if (!file.ok()) {
      for (size_t j = 0; j < i; ++j) {
        engine->Close(files.files_[j]);
        if (IsOnDevice(shape, j)) continue;
        engine->Remove(files.paths_[j]).IgnoreError();
      }
      return file.status();
    }
    files.files_.push_back(*file);
  }
  return files;
}

absl::StatusOr<RecordFiles> RecordFiles::Open(io::IoEngine* engine,
                                              const RecordLayout& layout,
                                              const Shape& shape) {
  RecordFiles files(layout, shape);
  for (size_t i = 0; i < shape.directories.size(); ++i) {
    absl::StatusOr<io::FileId> file =
        IsOnDevice(shape, i)
            ? files.OpenExtent(engine, shape.directories[i], shape.extents[i],
                               files.file_bytes_[i])
            : engine->Open(files.paths_[i], files.file_bytes_[i],
                           io::IoEngine::OpenMode::kOpen);
    if (absl::IsNotFound(file.status())) {
      return absl::DataLossError(
          absl::StrCat(files.paths_[i],
                       " is missing: it has a part of "
                       "the job's state. Is its disk mounted?"));
    }
    OPTSTATE_RETURN_IF_ERROR(file.status());
    files.files_.push_back(*file);
  }
  return files;
}

absl::Status RecordFiles::Remove(io::IoEngine* engine,
                                 absl::Span<const std::string> directories,
                                 uint32_t arrangement) {
  absl::Status status;
  for (const std::string& directory : directories) {
    const absl::Status removed = engine->Remove(PathIn(directory, arrangement));
    if (!absl::IsNotFound(removed)) status.Update(removed);
  }
  return status;
}

void RecordFiles::Close(io::IoEngine* engine) const {
  for (const io::FileId file : files_) engine->Close(file);
}

}  // namespace optstate::nvme
