#ifndef OPTSTATE_STORAGE_FORMAT_CHECKED_FILE_H_
#define OPTSTATE_STORAGE_FORMAT_CHECKED_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::storage {

// A small file that is read and replaced as a whole (job.binpb): a header, then
// a payload that this folder does not look into. Byte by byte: FORMAT.md.
struct CheckedFile {
  std::string layout_hash;   // 32 bytes
  uint64_t incarnation = 0;  // ties the files of one job together
  std::string payload;
};

inline constexpr uint64_t kCheckedFilePayloadBytesMax = uint64_t{256} << 20;

// Writes PATH.tmp, syncs it and renames it over PATH: a reader finds the old
// file or the new one, never a part.
absl::Status WriteCheckedFile(const std::string& path, const CheckedFile& file);

// Reads such a file. NOT_FOUND when there is none. DATA_LOSS, saying what was
// expected and found, when magic, version, size or checksum are wrong.
absl::StatusOr<CheckedFile> ReadCheckedFile(const std::string& path);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_FORMAT_CHECKED_FILE_H_
