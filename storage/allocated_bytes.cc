#include "storage/allocated_bytes.h"

#include <sys/stat.h>

#include <filesystem>
#include <system_error>

namespace optstate::storage {

// Jobs end while others are counted, so a directory may be gone when its turn
// comes. std::filesystem::recursive_directory_iterator ends at such a one, and
// what comes after it would not count: limits could be passed.
uint64_t AllocatedBytesBelow(const std::string& directory) {
  uint64_t bytes = 0;
  std::error_code error;
  std::filesystem::directory_iterator entry(directory, error);
  const std::filesystem::directory_iterator end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string path = entry->path().string();
    struct stat file_stat;
    if (::lstat(path.c_str(), &file_stat) != 0) continue;
    if (S_ISREG(file_stat.st_mode)) {
      bytes += static_cast<uint64_t>(file_stat.st_blocks) * 512;
    } else if (S_ISDIR(file_stat.st_mode)) {
      bytes += AllocatedBytesBelow(path);
    }
  }
  return bytes;
}

}  // namespace optstate::storage
