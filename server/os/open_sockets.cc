#include "server/os/open_sockets.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/types/os_error.h"

namespace optstate::os {

absl::StatusOr<std::set<ino_t>> OpenSockets(pid_t pid) {
  const std::string path = absl::StrCat("/proc/", pid, "/fd");
  DIR* directory = ::opendir(path.c_str());
  if (directory == nullptr) return OsError(errno, absl::StrCat("open ", path));
  const absl::Cleanup close = [directory] { ::closedir(directory); };
  std::set<ino_t> sockets;
  while (const dirent* entry = ::readdir(directory)) {
    char target[64];
    const ssize_t size =
        ::readlinkat(::dirfd(directory), entry->d_name, target, sizeof(target));
    absl::string_view text(target, size > 0 ? static_cast<size_t>(size) : 0);
    ino_t inode = 0;
    if (absl::ConsumePrefix(&text, "socket:[") &&
        absl::ConsumeSuffix(&text, "]") && absl::SimpleAtoi(text, &inode)) {
      sockets.insert(inode);
    }
  }
  return sockets;
}

absl::StatusOr<ino_t> SocketInode(int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return OsError(errno, "fstat of a socket");
  return info.st_ino;
}

}  // namespace optstate::os
