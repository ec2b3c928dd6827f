#include "server/upgrade/handover.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/unique_fd.h"
#include "server/config/own_flags.h"

namespace optstate::upgrade {
namespace {

std::vector<int> FdsOf(const v1::SupervisorHandover& handover) {
  std::vector<int> fds = {handover.state_lock_fd()};
  for (const auto& listener : handover.listeners()) {
    fds.push_back(listener.fd());
    if (listener.lock_fd() >= 0) fds.push_back(listener.lock_fd());
  }
  for (const auto& kept : handover.kept()) fds.push_back(kept.fd());
  return fds;
}

}  // namespace

absl::Status ExecuteInPlace(const std::string& path,
                            std::vector<std::string> args,
                            const v1::SupervisorHandover& handover) {
  const UniqueFd file(::memfd_create("optstate-handover", MFD_CLOEXEC));
  if (!file.ok()) return OsError(errno, "memfd_create");
  const std::string bytes = handover.SerializeAsString();
  if (::write(file.get(), bytes.data(), bytes.size()) !=
          static_cast<ssize_t>(bytes.size()) ||
      ::lseek(file.get(), 0, SEEK_SET) != 0) {
    return OsError(errno, "write the handover");
  }
  args.push_back(config::kHandoverFdFlag);
  args.push_back(absl::StrCat(file.get()));
  std::vector<char*> argv;
  argv.reserve(args.size() + 1);
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);

  std::vector<int> fds = FdsOf(handover);
  fds.push_back(file.get());
  // Marks fds that a library has opened unnoticed as close-on-exec.
  (void)::close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  for (const int fd : fds) ::fcntl(fd, F_SETFD, 0);
  ::execv(path.c_str(), argv.data());
  const absl::Status status = OsError(errno, absl::StrCat("execute ", path));
  for (const int fd : fds) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return status;
}

absl::StatusOr<v1::SupervisorHandover> ReadHandover(int fd) {
  const UniqueFd file(fd);
  v1::SupervisorHandover handover;
  if (!handover.ParseFromFileDescriptor(fd)) {
    return absl::InvalidArgumentError(
        absl::StrCat(config::kHandoverFdFlag,
                     " is for optstated's own use: no handover in fd ", fd));
  }
  for (const int one : FdsOf(handover)) {
    if (::fcntl(one, F_SETFD, FD_CLOEXEC) != 0) {
      return OsError(errno, absl::StrCat("fcntl of the inherited fd ", one));
    }
  }
  return handover;
}

}  // namespace optstate::upgrade
