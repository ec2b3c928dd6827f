#include "server/supervisor/sleep/sleep_manifest.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/types/status_macros.h"
#include "server/os/small_file.h"
#include "server/supervisor/sleep/file_copier.h"
#include "storage/disk_folder.h"
#include "storage/format/checksum.h"

namespace optstate::supervisor {
namespace {

// Files with a hundred thousand parts take a few MiB.
constexpr size_t kManifestBytesMax = size_t{256} << 20;

absl::Status Damaged(const std::string& path, absl::string_view why) {
  return absl::DataLossError(absl::StrCat(path, " is damaged: ", why));
}

// Checks that the file cannot lead out of the job's directory.
bool IsBelow(absl::string_view path) {
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    if (part.empty() || part == "." || part == "..") return false;
  }
  return true;
}

bool IsSound(const v1::SleepFile& file) {
  uint64_t end = 0;
  for (const v1::SleepExtent& extent : file.extents()) {
    if (extent.begin() < end || extent.begin() > file.size() ||
        extent.bytes() > file.size() - extent.begin()) {
      return false;
    }
    end = extent.begin() + extent.bytes();
  }
  return IsBelow(file.path());
}

}  // namespace

absl::Status WriteManifest(const std::string& folder,
                           const v1::SleepManifest& manifest) {
  v1::SleepManifestFile file;
  file.set_manifest(manifest.SerializeAsString());
  file.set_crc32c(
      storage::Crc32c(file.manifest().data(), file.manifest().size()));
  return storage::WriteDurably(folder + kManifestFile,
                               file.SerializeAsString());
}

absl::StatusOr<v1::SleepManifest> ReadManifest(const std::string& folder) {
  const std::string path = folder + kManifestFile;
  OPTSTATE_ASSIGN_OR_RETURN(const std::string text,
                            os::ReadSmallFile(path, kManifestBytesMax));
  v1::SleepManifestFile file;
  if (!file.ParseFromString(text)) return Damaged(path, "it has no manifest");
  if (storage::Crc32c(file.manifest().data(), file.manifest().size()) !=
      file.crc32c()) {
    return Damaged(path, "its checksum differs");
  }
  v1::SleepManifest manifest;
  if (!manifest.ParseFromString(file.manifest())) {
    return Damaged(path, "it has no manifest");
  }
  if (manifest.format() != kSleepFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has format ", manifest.format(), " of optstated ",
                     manifest.daemon_version(), ", this one knows ",
                     kSleepFormat, ": wake the job with that build"));
  }
  for (const v1::SleepFile& one : manifest.files()) {
    if (!IsSound(one)) {
      return Damaged(path, absl::StrCat("file \"", one.path(),
                                        "\" cannot be as it is described"));
    }
  }
  return manifest;
}

uint64_t DiskBytes(const v1::SleepManifest& manifest) {
  uint64_t bytes = 0;
  for (const v1::SleepFile& file : manifest.files()) bytes += DataBytes(file);
  return bytes;
}

uint64_t MemoryBytes(const v1::SleepManifest& manifest) {
  uint64_t bytes = 0;
  for (const v1::SleepFile& file : manifest.files()) {
    bytes += file.allocated_bytes();
  }
  return bytes;
}

}  // namespace optstate::supervisor
