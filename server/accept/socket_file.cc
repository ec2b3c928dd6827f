#include "server/accept/socket_file.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/path_owners.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/os/private_directory.h"

namespace optstate::accept {

sockaddr_un UnixSocketAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // config::CheckUnixSocketPath has checked the path's length.
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

absl::Status RemoveDeadSocket(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return OsError(errno, absl::StrCat("stat ", path));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is there and is not a socket"));
  }
  UniqueFd probe(
      ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!probe.ok()) return OsError(errno, "socket");
  const sockaddr_un address = UnixSocketAddress(path);
  const int result =
      ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address),
                sizeof(address));
  // EAGAIN: a process listens, and its backlog is full.
  if (result == 0 || errno == EAGAIN) {
    return absl::FailedPreconditionError(
        absl::StrCat("another process listens on ", path));
  }
  if (errno != ECONNREFUSED) {
    return OsError(errno, absl::StrCat("connect to ", path));
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return OsError(errno, absl::StrCat("unlink ", path));
  }
  return absl::OkStatus();
}

absl::Status PrepareSocketFolder(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  // Under /tmp a stranger may have created the directory first.
  OPTSTATE_RETURN_IF_ERROR(Annotate(
      CheckPathOwners(parent, PathOwners::kOurs),
      absl::StrCat("the socket ", path,
                   " (--socket; by default below $XDG_RUNTIME_DIR, where that "
                   "is set)")));
  struct stat info;
  if (::stat(parent.c_str(), &info) == 0) return absl::OkStatus();
  // The directory is accessible to all: the socket's own permissions decide who
  // may connect.
  return os::EnsurePrivateDirectory(parent, 0755);
}

}  // namespace optstate::accept
