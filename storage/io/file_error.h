#ifndef OPTSTATE_STORAGE_IO_FILE_ERROR_H_
#define OPTSTATE_STORAGE_IO_FILE_ERROR_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

// The texts of errors of files and disks: what was wrong, where, and what to
// do. Errors that a caller explains, such as ENOENT, have no text here.
namespace optstate::io {

// One error of a call on a file, an errno.
struct FileFault {
  int error = 0;
  const char* name = "";
  const char* what = "";
  const char* advice = "";
};

// Returns the errors that have a text here, by number.
absl::Span<const FileFault> FileFaults();

// The surroundings of a call that failed, as far as an error's text needs them.
struct FileSurroundings {
  struct Owner {
    std::string path;  // the file, or its folder when there is no file
    uint32_t uid = 0;
    uint32_t gid = 0;
    uint32_t mode = 0;  // the lower twelve bits
  };

  std::string path;
  // The bytes that the call was to bring to the file system; 0: not known.
  uint64_t bytes_needed = 0;
  // The room that the file system has for this user.
  std::optional<uint64_t> bytes_left;
  std::optional<uint64_t> files_left;  // inodes
  std::optional<Owner> owner;
  uint32_t uid = 0;  // of this process
  std::optional<uint64_t> open_files_max;
};

// Looks at what the text of an error needs, and at nothing else: the disk may
// be failing.
FileSurroundings LookAround(int error, const std::string& path,
                            uint64_t bytes_needed);

// Returns ": WHAT; WHAT TO DO", to be put behind a message; "" for errors that
// have no text here.
std::string FileAdvice(int error, const FileSurroundings& surroundings);

// Returns whether a message says already how to make room on a file system.
bool HasRoomAdvice(absl::string_view message);

// Returns OsError() with FileAdvice() behind it, of a file at `path`.
absl::Status FileError(int error, absl::string_view call,
                       const std::string& path, uint64_t bytes_needed = 0);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_FILE_ERROR_H_
