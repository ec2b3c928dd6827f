#include "storage/allocated_bytes.h"

#include <sys/stat.h>

#include <filesystem>
#include <system_error>

namespace optstate::storage {

uint64_t AllocatedBytesBelow(const std::string& directory) {
  uint64_t bytes = 0;
  std::error_code error;
  std::filesystem::recursive_directory_iterator files(
      directory, std::filesystem::directory_options::skip_permission_denied,
      error);
  const std::filesystem::recursive_directory_iterator end;
  while (!error && files != end) {
    struct stat file_stat;
    if (::lstat(files->path().c_str(), &file_stat) == 0 &&
        S_ISREG(file_stat.st_mode)) {
      bytes += static_cast<uint64_t>(file_stat.st_blocks) * 512;
    }
    files.increment(error);
  }
  return bytes;
}

}  // namespace optstate::storage
