#include "server/os/spawn.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/unique_fd.h"

namespace optstate::os {
namespace {

// Owns the objects that posix_spawn needs, and frees them on every path.
class SpawnSettings {
 public:
  SpawnSettings() {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawnattr_init(&attributes_);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }

  // `fds` are all above the numbers that they get.
  void SetFds(const std::vector<UniqueFd>& fds) {
    int number = kFirstInheritedFd;
    for (const UniqueFd& fd : fds) {
      ::posix_spawn_file_actions_adddup2(&actions_, fd.get(), number++);
    }
    ::posix_spawn_file_actions_addclosefrom_np(&actions_, number);
  }

  void SetOutput(int output) {
    ::posix_spawn_file_actions_adddup2(&actions_, output, STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions_, output, STDERR_FILENO);
  }

  void SetSignalsAndGroup() {
    sigset_t none;
    sigset_t all;
    ::sigemptyset(&none);
    ::sigfillset(&all);
    ::posix_spawnattr_setsigmask(&attributes_, &none);
    ::posix_spawnattr_setsigdefault(&attributes_, &all);
    ::posix_spawnattr_setpgroup(&attributes_, 0);
    ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK |
                                                 POSIX_SPAWN_SETSIGDEF |
                                                 POSIX_SPAWN_SETPGROUP);
  }

  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

}  // namespace

absl::StatusOr<pid_t> Spawn(const std::string& executable,
                            const std::vector<std::string>& args,
                            absl::Span<const int> fds, int output) {
  // Fds are moved above every number that the child gets, so that no dup2 in
  // the child overwrites one that is still needed.
  const int above = kFirstInheritedFd + static_cast<int>(fds.size());
  std::vector<UniqueFd> copies;
  for (const int fd : fds) {
    copies.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, above));
    if (!copies.back().ok()) return OsError(errno, "fcntl F_DUPFD_CLOEXEC");
  }
  SpawnSettings settings;
  if (output >= 0) settings.SetOutput(output);
  settings.SetFds(copies);
  settings.SetSignalsAndGroup();
  std::vector<char*> argv;
  argv.reserve(args.size() + 1);
  for (const std::string& arg : args) {
    argv.push_back(const_cast<char*>(arg.c_str()));
  }
  argv.push_back(nullptr);
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, executable.c_str(), settings.actions(),
                                  settings.attributes(), argv.data(), environ);
  // The error is not transient: the existing processes may go on running.
  if (error == EAGAIN) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "start ", executable, ": a limit of processes is reached"));
  }
  if (error != 0) return OsError(error, absl::StrCat("start ", executable));
  return pid;
}

}  // namespace optstate::os
