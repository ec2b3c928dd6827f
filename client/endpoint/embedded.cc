#include "client/endpoint/embedded.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/base/call_once.h"
#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "client/endpoint/dial.h"
#include "client/endpoint/embedded_directory.h"
#include "client/endpoint/endpoint.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

extern char** environ;

namespace optstate::client {
namespace {

constexpr absl::string_view kBinary = "optstated";
// The time between two attempts to connect to a daemon that is starting.
constexpr int kPollMs = 2;
// The end of the log that an error message shows.
constexpr size_t kLogTailBytes = 2048;

struct Daemon {
  pid_t owner = 0;  // the process that started it
  pid_t pid = 0;
  UniqueFd process;  // pidfd; none on kernels without it
  UniqueFd lifeline;
  UniqueFd owner_lock;  // of the directory
  std::string directory;
  std::string socket;
};

ABSL_CONST_INIT absl::Mutex mutex(absl::kConstInit);
Daemon* current ABSL_GUARDED_BY(mutex) = nullptr;
// The lifeline that a forked child has to close, or the daemon would outlive
// its owner.
int lifeline_to_close = -1;

bool IsExecutable(const std::string& path) {
  return access(path.c_str(), X_OK) == 0 &&
         !std::filesystem::is_directory(path);
}

// Returns the directory of the shared library, or program, that contains this
// code.
std::string OwnDirectory() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&EmbeddedDaemonSocket), &info) == 0 ||
      info.dli_fname == nullptr) {
    return std::string();
  }
  std::error_code error;
  return std::filesystem::canonical(info.dli_fname, error)
      .parent_path()
      .string();
}

absl::StatusOr<std::string> FindBinary(std::string named) {
  const char* variable = std::getenv("OPTSTATE_DAEMON");
  if (named.empty() && variable != nullptr) named = variable;
  if (!named.empty()) {
    if (IsExecutable(named)) return named;
    return absl::NotFoundError(absl::StrCat(named, " is not an executable"));
  }
  std::vector<std::string> directories = {OwnDirectory()};
  if (const char* path = std::getenv("PATH")) {
    for (absl::string_view part :
         absl::StrSplit(path, ':', absl::SkipEmpty())) {
      directories.emplace_back(part);
    }
  }
  for (const std::string& directory : directories) {
    std::string path = absl::StrCat(directory, "/", kBinary);
    if (IsExecutable(path)) return path;
  }
  return absl::NotFoundError(
      absl::StrCat(kBinary, " is neither at $OPTSTATE_DAEMON, nor in ",
                   directories[0], ", nor on PATH"));
}

// Returns the end of the daemon's log.
std::string LogTail(const std::string& directory) {
  std::ostringstream text;
  text << std::ifstream(absl::StrCat(directory, "/log")).rdbuf();
  const std::string all = text.str();
  const size_t bytes = std::min(all.size(), kLogTailBytes);
  return std::string(
      absl::StripAsciiWhitespace(all.substr(all.size() - bytes)));
}

// Spawn attributes and file actions, freed in every case.
struct SpawnSetup {
  SpawnSetup() {
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_init(&actions);
  }
  ~SpawnSetup() {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  }
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_t actions;
};

// Puts the daemon into a session of its own, with default signals: an interrupt
// typed at the trainer goes to the trainer, whose end then ends the daemon.
void SetAttributes(posix_spawnattr_t* attributes) {
  sigset_t none;
  sigset_t all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(attributes, &none);
  posix_spawnattr_setsigdefault(attributes, &all);
  posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSIGMASK |
                                           POSIX_SPAWN_SETSIGDEF |
                                           POSIX_SPAWN_SETSID);
}

absl::StatusOr<pid_t> Spawn(const std::string& binary,
                            const std::string& directory,
                            const std::string& socket, int lifeline) {
  SpawnSetup setup;
  SetAttributes(&setup.attributes);
  const std::string log = absl::StrCat(directory, "/log");
  posix_spawn_file_actions_addopen(&setup.actions, STDIN_FILENO, "/dev/null",
                                   O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&setup.actions, STDERR_FILENO, log.c_str(),
                                   O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&setup.actions, STDERR_FILENO,
                                   STDOUT_FILENO);
  // A dup2 onto itself clears close-on-exec.
  posix_spawn_file_actions_adddup2(&setup.actions, lifeline, lifeline);
  std::vector<std::string> words = {
      binary,        "--embedded", absl::StrCat(lifeline),
      "--state-dir", directory,    "--socket",
      socket};
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, binary.c_str(), &setup.actions,
                                &setup.attributes, arguments.data(), environ);
  if (error != 0) return OsError(error, absl::StrCat("posix_spawn ", binary));
  return pid;
}

// Waits briefly until the daemon ends; returns whether it has, and reaps it
// then. The pidfd also tells when the trainer has reaped the daemon itself.
bool EndsWithin(const Daemon& daemon, int timeout_ms) {
  pollfd entry = {.fd = daemon.process.get(), .events = POLLIN, .revents = 0};
  const bool ended = poll(&entry, 1, timeout_ms) > 0;
  return waitpid(daemon.pid, nullptr, WNOHANG) == daemon.pid || ended;
}

absl::Status AwaitSocket(const Daemon& daemon, absl::Time deadline) {
  Endpoint endpoint;
  endpoint.kind = Endpoint::Kind::kShm;
  endpoint.path = daemon.socket;
  while (!Dial(endpoint, deadline).ok()) {
    if (EndsWithin(daemon, kPollMs)) {
      return absl::UnavailableError(
          absl::StrCat("it ended at its start: ", LogTail(daemon.directory)));
    }
    if (absl::Now() >= deadline) {
      kill(daemon.pid, SIGKILL);
      waitpid(daemon.pid, nullptr, 0);
      return absl::DeadlineExceededError(absl::StrCat(
          "it did not take connections in time: ", LogTail(daemon.directory)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Daemon> Start(const std::string& daemon_path,
                             absl::Time deadline) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::string binary, FindBinary(daemon_path));
  Daemon daemon;
  daemon.owner = getpid();
  RemoveAbandonedDirectories();
  OPTSTATE_ASSIGN_OR_RETURN(EmbeddedDirectory directory,
                            MakeEmbeddedDirectory());
  daemon.directory = std::move(directory.path);
  daemon.owner_lock = std::move(directory.owner_lock);
  daemon.socket = absl::StrCat(daemon.directory, "/optstated.sock");
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return OsError(errno, "pipe2");
  const UniqueFd read_end(ends[0]);
  daemon.lifeline.reset(ends[1]);
  absl::StatusOr<pid_t> pid =
      Spawn(binary, daemon.directory, daemon.socket, read_end.get());
  absl::Status status = pid.status();
  if (pid.ok()) {
    daemon.pid = *pid;
    daemon.process.reset(static_cast<int>(syscall(SYS_pidfd_open, *pid, 0)));
    status = AwaitSocket(daemon, deadline);
  }
  if (!status.ok()) {
    std::error_code ignored;
    std::filesystem::remove_all(daemon.directory, ignored);
    return status;
  }
  return daemon;
}

bool Lives(const Daemon& daemon) {
  return daemon.owner == getpid() && !EndsWithin(daemon, 0);
}

// A forked child inherits what its parent holds: the lifeline and perhaps the
// mutex.
void BeforeFork() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex.Lock(); }
void AfterForkInParent() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex.Unlock(); }
void AfterForkInChild() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (lifeline_to_close >= 0) close(lifeline_to_close);
  lifeline_to_close = -1;
  if (current != nullptr) {
    current->lifeline.release();
    current->owner_lock.reset();
  }
  mutex.Unlock();
}

}  // namespace

absl::StatusOr<std::string> EmbeddedDaemonSocket(const std::string& daemon_path,
                                                 absl::Time deadline) {
  static absl::once_flag at_fork;
  absl::call_once(at_fork, [] {
    pthread_atfork(&BeforeFork, &AfterForkInParent, &AfterForkInChild);
  });
  absl::MutexLock lock(&mutex);
  if (current != nullptr && Lives(*current)) return current->socket;
  OPTSTATE_ASSIGN_OR_RETURN(Daemon daemon, Start(daemon_path, deadline));
  lifeline_to_close = daemon.lifeline.get();
  // The new object lives until the process ends.
  delete std::exchange(current, new Daemon(std::move(daemon)));
  return current->socket;
}

}  // namespace optstate::client
