#include "client/ctl/program_output.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <csignal>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {
namespace {

absl::StatusOr<pid_t> Spawn(std::vector<std::string> command, int out) {
  std::vector<char*> argv;
  argv.reserve(command.size() + 1);
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  const absl::Cleanup destroy = [&actions] {
    ::posix_spawn_file_actions_destroy(&actions);
  };
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null",
                                     O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null",
                                     O_WRONLY, 0);
  pid_t pid = 0;
  const int error =
      ::posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), ::environ);
  if (error != 0) return OsError(error, absl::StrCat("run ", command[0]));
  return pid;
}

// Reads until the other end is closed, as far as `bytes_max`.
absl::StatusOr<std::string> ReadAll(int fd, size_t bytes_max,
                                    absl::Time deadline) {
  std::string output;
  std::array<char, 65536> buffer;
  while (true) {
    const double left_ms =
        std::ceil(absl::ToDoubleMilliseconds(deadline - absl::Now()));
    if (left_ms <= 0) return absl::DeadlineExceededError("did not end in time");
    pollfd polled = {.fd = fd, .events = POLLIN, .revents = 0};
    if (::poll(&polled, 1, static_cast<int>(std::fmin(left_ms, 1e6))) <= 0) {
      continue;
    }
    const ssize_t size = ::read(fd, buffer.data(), buffer.size());
    if (size < 0 && errno != EINTR) return OsError(errno, "read its output");
    if (size == 0) return output;
    if (size > 0) {
      output.append(buffer.data(), std::min(static_cast<size_t>(size),
                                            bytes_max - output.size()));
    }
  }
}

}  // namespace

absl::StatusOr<std::string> OutputOf(const std::vector<std::string>& command,
                                     size_t bytes_max, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::array<int, 2> fds;
  if (::pipe2(fds.data(), O_CLOEXEC) != 0) return OsError(errno, "pipe2");
  const UniqueFd in(fds[0]);
  UniqueFd out(fds[1]);
  OPTSTATE_ASSIGN_OR_RETURN(const pid_t pid, Spawn(command, out.get()));
  out.reset();
  absl::StatusOr<std::string> output = ReadAll(in.get(), bytes_max, deadline);
  if (!output.ok()) ::kill(pid, SIGKILL);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!output.ok()) {
    return absl::Status(
        output.status().code(),
        absl::StrCat(command[0], ": ", output.status().message()));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return output;
  return absl::AbortedError(absl::StrCat(
      command[0],
      WIFEXITED(status) ? " ended with exit code " : " was killed by signal ",
      WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status)));
}

}  // namespace optstate::ctl
