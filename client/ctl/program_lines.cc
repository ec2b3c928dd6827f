#include "client/ctl/program_lines.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {
namespace {

// The options of less are systemd's: it ends by itself when all fits the
// screen.
constexpr char kPager[] =
    "if command -v less >/dev/null; then LESS=${SYSTEMD_LESS-FRSXMK} exec "
    "less; "
    "else exec cat; fi";

// Returns the command line of the pager, for a shell; "": none is wanted.
std::string FindPager() {
  if (::isatty(STDOUT_FILENO) == 0) return "";
  for (const char* const variable : {"SYSTEMD_PAGER", "PAGER"}) {
    const char* const pager = std::getenv(variable);
    if (pager != nullptr) return pager;
  }
  return kPager;
}

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
  ::posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  pid_t pid = 0;
  const int error =
      ::posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), ::environ);
  if (error != 0) return OsError(error, absl::StrCat("run ", command[0]));
  return pid;
}

// Writes a line; false: nobody reads it.
bool WriteLine(const std::string& line, bool follows, FILE* out) {
  const size_t written = std::fwrite(line.data(), 1, line.size(), out);
  if (written != line.size() || std::fputc('\n', out) == EOF) return false;
  return !follows || std::fflush(out) == 0;
}

int ExitCodeOf(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  constexpr int kBySignal = 128;
  return WIFEXITED(status) ? WEXITSTATUS(status) : kBySignal + WTERMSIG(status);
}

}  // namespace

absl::StatusOr<int> PassLines(
    std::vector<std::string> command, bool follows,
    const std::function<std::string(absl::string_view)>& change) {
  std::array<int, 2> fds;
  if (::pipe2(fds.data(), O_CLOEXEC) != 0) return OsError(errno, "pipe2");
  UniqueFd in(fds[0]);
  UniqueFd out(fds[1]);
  OPTSTATE_ASSIGN_OR_RETURN(const pid_t pid,
                            Spawn(std::move(command), out.get()));
  out.reset();
  const std::string pager = follows ? "" : FindPager();
  FILE* const paged = pager.empty() ? nullptr : ::popen(pager.c_str(), "w");
  FILE* const sink = paged == nullptr ? stdout : paged;
  // Set when both programs run: they are not to inherit it.
  auto* const former = std::signal(SIGINT, SIG_IGN);
  FILE* const lines = ::fdopen(in.release(), "r");
  char* line = nullptr;
  size_t capacity = 0;
  ssize_t size = 0;
  bool is_read = true;
  while (is_read && (size = ::getline(&line, &capacity, lines)) > 0) {
    if (line[size - 1] == '\n') --size;
    is_read =
        WriteLine(change(absl::string_view(line, static_cast<size_t>(size))),
                  follows, sink);
  }
  std::free(line);
  std::fclose(lines);  // ends a program whose lines nobody reads
  if (paged != nullptr) {
    ::pclose(paged);
  } else {
    std::fflush(stdout);
  }
  const int code = ExitCodeOf(pid);
  std::signal(SIGINT, former);
  return code;
}

}  // namespace optstate::ctl
