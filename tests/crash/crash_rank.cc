#include "tests/crash/crash_rank.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

extern char** environ;

namespace optstate::crash {
namespace {

constexpr char kBinary[] = "tests/crash/crash_rank_main";
constexpr absl::Duration kPatience = absl::Seconds(60);

absl::StatusOr<pid_t> Spawn(std::vector<std::string> words, int answer) {
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, answer, STDOUT_FILENO);
  pid_t pid = 0;
  const int error =
      posix_spawn(&pid, kBinary, &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return OsError(error, absl::StrCat("posix_spawn ", kBinary));
  return pid;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CrashRank>> CrashRank::Start(
    const Options& options) {
  const std::string path =
      absl::StrCat(options.directory, "/board-", options.rank);
  OPTSTATE_ASSIGN_OR_RETURN(SharedPage board,
                            SharedPage::Map(path, SharedPage::Access::kCreate));
  static_cast<RankBoard*>(board.data())->phase = RankPhase::kOther;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return OsError(errno, "pipe2");
  UniqueFd read_end(ends[0]);
  const UniqueFd write_end(ends[1]);
  OPTSTATE_ASSIGN_OR_RETURN(
      const pid_t pid,
      Spawn({kBinary, options.endpoint, options.job, absl::StrCat(options.rank),
             options.scenario.ToWord(), path},
            write_end.get()));
  return std::unique_ptr<CrashRank>(
      new CrashRank(pid, std::move(read_end), std::move(board)));
}

CrashRank::~CrashRank() { Kill().IgnoreError(); }

absl::Status CrashRank::Kill() {
  process_.Signal(SIGKILL);
  return process_.AwaitEnd(absl::Now() + kPatience);
}

absl::StatusOr<uint64_t> CrashRank::Result() {
  OPTSTATE_RETURN_IF_ERROR(process_.AwaitEnd(absl::Now() + kPatience));
  std::string line;
  for (char byte; read(answer_.get(), &byte, 1) == 1 && byte != '\n';) {
    line.push_back(byte);
  }
  uint64_t hash = 0;
  if (absl::SimpleAtoi(line, &hash)) return hash;
  return absl::UnknownError(absl::StrCat("the rank ended: ", line));
}

}  // namespace optstate::crash
