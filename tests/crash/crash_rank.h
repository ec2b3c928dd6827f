#ifndef OPTSTATE_TESTS_CRASH_CRASH_RANK_H_
#define OPTSTATE_TESTS_CRASH_CRASH_RANK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/crash/rank_board.h"
#include "tests/crash/scenario.h"
#include "tests/crash/shared_page.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::crash {

// A rank in a process of its own (crash_rank_main.cc) that goes through its
// scenario, from the job's committed step to the end, by itself.
class CrashRank {
 public:
  struct Options {
    std::string endpoint;
    std::string job;
    uint32_t rank = 0;
    Scenario scenario;
    std::string directory;  // for its board
  };

  static absl::StatusOr<std::unique_ptr<CrashRank>> Start(
      const Options& options);
  ~CrashRank();

  bool running() const { return process_.running(); }
  RankPhase phase() const { return board().phase; }
  // Returns the steps run again, with those of the ranks whose place this one
  // took.
  uint64_t steps_again() const { return board().steps_again; }
  uint64_t answered_step() const { return board().answered_step; }
  // Sends SIGKILL; returns when the process is dead.
  absl::Status Kill();
  // Returns the result of a rank that has ended by itself: the hash of the
  // parameters that it saw, or its error.
  absl::StatusOr<uint64_t> Result();

 private:
  CrashRank(pid_t pid, UniqueFd answer, SharedPage board)
      : process_(pid), answer_(std::move(answer)), board_(std::move(board)) {}

  const RankBoard& board() const {
    return *static_cast<const RankBoard*>(board_.data());
  }

  Process process_;
  UniqueFd answer_;
  SharedPage board_;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_CRASH_RANK_H_
