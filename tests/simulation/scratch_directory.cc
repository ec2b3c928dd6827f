#include "tests/simulation/scratch_directory.h"

#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::simulation {

absl::StatusOr<ScratchDirectory> ScratchDirectory::Make() {
  const char* const given = std::getenv("TEST_TMPDIR");
  const char* const parent = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm"
                             : given != nullptr              ? given
                                                             : "/tmp";
  std::string path = absl::StrCat(parent, "/optstate-simulation-XXXXXX");
  if (::mkdtemp(path.data()) == nullptr) {
    return OsError(errno, absl::StrCat("mkdtemp ", path));
  }
  return ScratchDirectory(std::move(path));
}

ScratchDirectory::~ScratchDirectory() {
  if (path_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

uint64_t ScratchDirectory::FileBytes() const {
  uint64_t bytes = 0;
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator entry(path_, error), end;
       !error && entry != end; entry.increment(error)) {
    std::error_code no_file;
    const uintmax_t size = entry->file_size(no_file);
    if (!no_file) bytes += size;
  }
  return bytes;
}

}  // namespace optstate::simulation
