#include "tests/load/flood_process.h"

#include <fcntl.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

extern char** environ;

namespace optstate::load {
namespace {

constexpr char kBinary[] = "tests/load/flood_main";
// A flood of many rounds on a machine that does other things too is slow.
constexpr int kPatienceMs = 300'000;
constexpr absl::Duration kPatience = absl::Milliseconds(kPatienceMs);
// The number of "nobody" where no file names it.
constexpr uid_t kNobody = 65534;

absl::StatusOr<pid_t> Spawn(const FloodProcess::Options& options, int input,
                            int output) {
  const bool spins = options.kind == FloodProcess::Kind::kSpin;
  std::vector<std::string> words = {kBinary,
                                    options.socket,
                                    absl::StrCat(options.uid),
                                    absl::StrCat(options.seed),
                                    absl::StrCat(options.threads),
                                    absl::StrCat(spins ? 0 : options.rounds),
                                    spins ? "spin" : "flood"};
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  pid_t pid = 0;
  const int error =
      posix_spawn(&pid, kBinary, &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return OsError(error, absl::StrCat("posix_spawn ", kBinary));
  return pid;
}

}  // namespace

uid_t FloodUid() {
  const passwd* const nobody = getpwnam("nobody");
  return nobody == nullptr ? kNobody : nobody->pw_uid;
}

absl::Status CheckMayFlood() {
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<FloodProcess> trial,
      FloodProcess::Start({.socket = "none",
                           .uid = FloodUid(),
                           .kind = FloodProcess::Kind::kSpin}));
  return trial->End().status();
}

FloodProcess::FloodProcess(pid_t pid, UniqueFd input, UniqueFd output)
    : process_(pid), input_(std::move(input)), output_(std::move(output)) {}

FloodProcess::~FloodProcess() {
  process_.Signal(SIGKILL);
  // A destructor has nobody to tell: End() is how a caller hears of errors.
  process_.AwaitEnd(absl::Now() + kPatience).IgnoreError();
}

absl::StatusOr<std::unique_ptr<FloodProcess>> FloodProcess::Start(
    const Options& options) {
  if (geteuid() != 0) {
    return absl::FailedPreconditionError(
        "a flood by another user needs root, who alone can be another user");
  }
  int input[2];
  int output[2];
  if (pipe2(input, O_CLOEXEC) != 0) return OsError(errno, "pipe2");
  const UniqueFd input_read(input[0]);
  UniqueFd input_write(input[1]);
  if (pipe2(output, O_CLOEXEC) != 0) return OsError(errno, "pipe2");
  UniqueFd output_read(output[0]);
  UniqueFd output_write(output[1]);
  OPTSTATE_ASSIGN_OR_RETURN(
      const pid_t pid, Spawn(options, input_read.get(), output_write.get()));
  std::unique_ptr<FloodProcess> flood(
      new FloodProcess(pid, std::move(input_write), std::move(output_read)));
  // With this end open, the end of the process would not be that of its output.
  output_write.reset();
  OPTSTATE_RETURN_IF_ERROR(flood->AwaitReady());
  return flood;
}

absl::StatusOr<std::string> FloodProcess::ReadLine() {
  std::string line;
  while (true) {
    pollfd entry = {.fd = output_.get(), .events = POLLIN, .revents = 0};
    if (poll(&entry, 1, kPatienceMs) == 0) {
      return absl::DeadlineExceededError("the flood does not answer");
    }
    char byte;
    const ssize_t count = read(output_.get(), &byte, 1);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::UnavailableError("the flood has ended");
    if (byte == '\n') return line;
    line.push_back(byte);
  }
}

absl::Status FloodProcess::AwaitReady() {
  OPTSTATE_ASSIGN_OR_RETURN(const std::string line, ReadLine());
  if (line == "ready") return absl::OkStatus();
  if (absl::StartsWith(line, "unable ")) {
    return absl::FailedPreconditionError(line);
  }
  return absl::InternalError(absl::StrCat("the flood: ", line));
}

absl::StatusOr<FloodCounts> FloodProcess::End() {
  input_.reset();
  FloodCounts counts;
  absl::StatusOr<std::string> line;
  while ((line = ReadLine()).ok()) {
    const size_t space = line->rfind(' ');
    uint64_t count = 0;
    if (space == std::string::npos ||
        !absl::SimpleAtoi(line->substr(space + 1), &count)) {
      return absl::InternalError(absl::StrCat("the flood said: ", *line));
    }
    counts[line->substr(0, space)] = count;
  }
  if (!absl::IsUnavailable(line.status())) return line.status();
  OPTSTATE_RETURN_IF_ERROR(process_.AwaitEnd(absl::Now() + kPatience));
  return counts;
}

}  // namespace optstate::load
