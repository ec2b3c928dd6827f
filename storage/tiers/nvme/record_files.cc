#include "storage/tiers/nvme/record_files.h"

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/tiers/nvme/record_split.h"

namespace optstate::nvme {
namespace {

std::string PathIn(const std::string& directory) {
  return absl::StrCat(directory, "/records");
}

}  // namespace

RecordFiles::RecordFiles(const RecordLayout& layout, const Shape& shape)
    : file_bytes_(shape.directories.size(), 0),
      split_(SplitRecords(shape.records, shape.directories.size(),
                          shape.weights)) {
  offsets_.reserve(shape.records);
  slot_bytes_.reserve(shape.records);
  for (uint32_t record = 0; record < shape.records; ++record) {
    uint64_t& end = file_bytes_[split_[record]];
    offsets_.push_back(end);
    slot_bytes_.push_back(layout.bytes(record));
    end += shape.slots * layout.bytes(record);
  }
  // A file cannot be reserved empty.
  for (uint64_t& bytes : file_bytes_) {
    if (bytes == 0) bytes = io::kSectorBytes;
  }
}

absl::StatusOr<RecordFiles> RecordFiles::Create(io::IoEngine* engine,
                                                const RecordLayout& layout,
                                                const Shape& shape) {
  const absl::Span<const std::string> directories = shape.directories;
  RecordFiles files(layout, shape);
  for (size_t i = 0; i < directories.size(); ++i) {
    const absl::StatusOr<io::FileId> file =
        engine->Open(PathIn(directories[i]), files.file_bytes_[i],
                     io::IoEngine::OpenMode::kCreate);
    if (!file.ok()) {
      for (size_t j = 0; j < i; ++j) {
        engine->Close(files.files_[j]);
        engine->Remove(PathIn(directories[j])).IgnoreError();
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
  const absl::Span<const std::string> directories = shape.directories;
  RecordFiles files(layout, shape);
  for (size_t i = 0; i < directories.size(); ++i) {
    absl::StatusOr<io::FileId> file =
        engine->Open(PathIn(directories[i]), files.file_bytes_[i],
                     io::IoEngine::OpenMode::kOpen);
    if (absl::IsNotFound(file.status())) {
      return absl::DataLossError(
          absl::StrCat(PathIn(directories[i]),
                       " is missing: it has a part of "
                       "the job's state. Is its disk mounted?"));
    }
    OPTSTATE_RETURN_IF_ERROR(file.status());
    files.files_.push_back(*file);
  }
  return files;
}

absl::Status RecordFiles::Remove(io::IoEngine* engine,
                                 absl::Span<const std::string> directories) {
  absl::Status status;
  for (const std::string& directory : directories) {
    const absl::Status removed = engine->Remove(PathIn(directory));
    if (!absl::IsNotFound(removed)) status.Update(removed);
  }
  return status;
}

}  // namespace optstate::nvme
