#include "server/os/tree_removal.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/functional/function_ref.h"
#include "server/os/private_directory.h"

namespace optstate::os {
namespace {

using OnFile =
    absl::FunctionRef<void(const std::string& path, const struct stat& info)>;

// Calls `on_file` with each regular file below a directory, as far as they can
// be listed. Follows no symbolic link.
void ForEachFile(const std::string& directory, OnFile on_file) {
  struct stat info;
  if (::lstat(directory.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) return;
  std::error_code error;
  std::filesystem::directory_iterator entry(directory, error);
  const std::filesystem::directory_iterator end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string path = entry->path().string();
    if (::lstat(path.c_str(), &info) != 0) continue;
    if (S_ISREG(info.st_mode)) on_file(path, info);
    if (S_ISDIR(info.st_mode)) ForEachFile(path, on_file);
  }
}

uint64_t AllocatedBytes(const struct stat& info) {
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

// Cuts a file piece by piece; returns the bytes that it still takes, as far as
// it has no holes.
uint64_t Cut(const std::string& path, const struct stat& info,
             uint64_t piece_bytes, RemovalProgress* progress) {
  uint64_t left = AllocatedBytes(info);
  auto size = static_cast<uint64_t>(info.st_size);
  while (size > piece_bytes) {
    size -= piece_bytes;
    if (::truncate(path.c_str(), static_cast<off_t>(size)) != 0) break;
    const uint64_t freed = std::min(left, piece_bytes);
    left -= freed;
    progress->bytes += freed;
  }
  return left;
}

}  // namespace

absl::Status RemoveTrees(const std::vector<TreeToRemove>& trees,
                         RemovalProgress* progress, uint64_t piece_bytes) {
  uint64_t total = 0;
  for (const TreeToRemove& tree : trees) {
    ForEachFile(tree.path,
                [&total](const std::string&, const struct stat& info) {
                  total += AllocatedBytes(info);
                });
  }
  progress->bytes_total = total;
  absl::Status status;
  for (const TreeToRemove& tree : trees) {
    ForEachFile(tree.path, [&](const std::string& path,
                               const struct stat& info) {
      const bool may_be_cut = !tree.may_be_mapped && info.st_nlink == 1;
      const uint64_t left = may_be_cut ? Cut(path, info, piece_bytes, progress)
                                       : AllocatedBytes(info);
      // RemoveTree() says what cannot be removed here.
      if (::unlink(path.c_str()) == 0) progress->bytes += left;
    });
    status.Update(RemoveTree(tree.path));
  }
  return status;
}

}  // namespace optstate::os
