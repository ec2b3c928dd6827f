#include "server/os/run_program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/os/spawn.h"

namespace optstate::os {
namespace {

constexpr size_t kOutputBytesMax = 64 << 10;

// Reads until the program, and every process that it has started, closes `fd`;
// false at the deadline.
bool ReadToEnd(int fd, absl::Time deadline, std::string* output) {
  char buffer[4096];
  while (true) {
    const int64_t left_ms =
        std::max<int64_t>(absl::ToInt64Milliseconds(deadline - absl::Now()), 0);
    pollfd readable{fd, POLLIN, 0};
    const int ready = ::poll(&readable, 1, static_cast<int>(left_ms));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    const ssize_t bytes = ::read(fd, buffer, sizeof(buffer));
    if (bytes == 0) return true;
    if (bytes < 0) continue;
    const size_t room = kOutputBytesMax - output->size();
    output->append(buffer, std::min(room, static_cast<size_t>(bytes)));
  }
}

// Awaits the program's exit: it may close its output long before.
bool AwaitExit(pid_t pid, absl::Time deadline, int* status) {
  while (::waitpid(pid, status, WNOHANG) == 0) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

}  // namespace

absl::StatusOr<ProgramResult> RunProgram(const std::string& path,
                                         const std::vector<std::string>& args,
                                         absl::Duration timeout) {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) return OsError(errno, "pipe2");
  const UniqueFd read_end(fds[0]);
  UniqueFd write_end(fds[1]);
  OPTSTATE_ASSIGN_OR_RETURN(const pid_t pid,
                            Spawn(path, args, {}, write_end.get()));
  write_end.reset();
  ProgramResult result;
  const absl::Time deadline = absl::Now() + timeout;
  int status = 0;
  const bool ended = ReadToEnd(read_end.get(), deadline, &result.output) &&
                     AwaitExit(pid, deadline, &status);
  if (!ended) {
    ::kill(-pid, SIGKILL);  // its process group
    ::waitpid(pid, nullptr, 0);
    return absl::DeadlineExceededError(absl::StrCat(
        path, " did not end within ", absl::FormatDuration(timeout)));
  }
  result.exit_status =
      WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  return result;
}

}  // namespace optstate::os
