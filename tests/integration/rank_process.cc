#include "tests/integration/rank_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

extern char** environ;

namespace optstate {
namespace {

constexpr char kBinary[] = "tests/integration/rank_process_main";
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr int kPatienceMs = 60'000;

absl::StatusOr<pid_t> Spawn(const RankProcess::Options& options, int commands,
                            int answers) {
  std::vector<std::string> words = {kBinary,
                                    options.endpoint,
                                    options.daemon_path,
                                    options.job,
                                    absl::StrCat(options.rank),
                                    absl::StrCat(options.world_size),
                                    absl::StrCat(options.seed)};
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, commands, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, answers, STDOUT_FILENO);
  pid_t pid = 0;
  const int error =
      posix_spawn(&pid, kBinary, &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return OsError(error, absl::StrCat("posix_spawn ", kBinary));
  return pid;
}

}  // namespace

RankProcess::RankProcess(pid_t pid, int commands, int answers)
    : process_(pid), commands_(commands), answers_(answers) {}

RankProcess::~RankProcess() { Kill().IgnoreError(); }

absl::StatusOr<std::unique_ptr<RankProcess>> RankProcess::Start(
    const Options& options) {
  int commands[2];
  int answers[2];
  if (pipe2(commands, O_CLOEXEC) != 0) return OsError(errno, "pipe2");
  const UniqueFd commands_read(commands[0]);
  UniqueFd commands_write(commands[1]);
  if (pipe2(answers, O_CLOEXEC) != 0) return OsError(errno, "pipe2");
  UniqueFd answers_read(answers[0]);
  const UniqueFd answers_write(answers[1]);
  OPTSTATE_ASSIGN_OR_RETURN(const pid_t pid, Spawn(options, commands_read.get(),
                                                   answers_write.get()));
  std::unique_ptr<RankProcess> rank(
      new RankProcess(pid, commands_write.release(), answers_read.release()));
  OPTSTATE_RETURN_IF_ERROR(rank->Receive().status());
  return rank;
}

absl::Status RankProcess::Send(const std::string& command) {
  const std::string line = command + "\n";
  if (write(commands_.get(), line.data(), line.size()) !=
      static_cast<ssize_t>(line.size())) {
    return OsError(errno, "write of a command");
  }
  return absl::OkStatus();
}

// An answer is one line: "ok TEXT" or "CODE TEXT".
absl::StatusOr<std::string> RankProcess::Receive() {
  std::string line;
  while (true) {
    pollfd entry = {.fd = answers_.get(), .events = POLLIN, .revents = 0};
    if (poll(&entry, 1, kPatienceMs) == 0) {
      return absl::DeadlineExceededError("the rank does not answer");
    }
    char byte;
    const ssize_t count = read(answers_.get(), &byte, 1);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::UnavailableError("the rank is gone");
    if (byte == '\n') break;
    line.push_back(byte);
  }
  const std::pair<std::string, std::string> words =
      absl::StrSplit(line, absl::MaxSplits(' ', 1));
  if (words.first == "ok") return words.second;
  int code = 0;
  if (!absl::SimpleAtoi(words.first, &code)) {
    return absl::InternalError(line);
  }
  return absl::Status(static_cast<absl::StatusCode>(code), words.second);
}

absl::StatusOr<std::string> RankProcess::Do(const std::string& command) {
  OPTSTATE_RETURN_IF_ERROR(Send(command));
  return Receive();
}

absl::Status RankProcess::Kill() {
  process_.Signal(SIGKILL);
  return process_.AwaitEnd(absl::Now() + kPatience);
}

}  // namespace optstate
