#ifndef OPTSTATE_TESTS_INTEGRATION_RANK_PROCESS_H_
#define OPTSTATE_TESTS_INTEGRATION_RANK_PROCESS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {

// A trainer's rank in a process of its own (rank_process_main.cc), which can be
// killed at a known moment. It carries out one command after the other: Send()
// hands one over, Receive() waits for its answer.
//
//   load        loads the script's parameters
//   push K      pushes step K and flushes
//   commit K    commits step K
//   step K      both
//   committed   answers the committed step
//   fetch       fetches all of the state
//   info        answers the endpoint
//
// Threads: one at a time.
class RankProcess {
 public:
  struct Options {
    std::string endpoint;
    std::string daemon_path;  // for "embedded"
    std::string job;
    uint32_t rank = 0;
    uint32_t world_size = 1;
    uint64_t seed = 0;  // of the StepScript on MixedLayout()
  };

  // Starts a rank; returns when the session is open, or with its error.
  static absl::StatusOr<std::unique_ptr<RankProcess>> Start(
      const Options& options);
  ~RankProcess();

  absl::Status Send(const std::string& command);
  // Returns what the command answered.
  absl::StatusOr<std::string> Receive();
  absl::StatusOr<std::string> Do(const std::string& command);

  const Process& process() const { return process_; }
  // Sends SIGKILL; returns when the process is dead.
  absl::Status Kill();

 private:
  RankProcess(pid_t pid, int commands, int answers);

  Process process_;
  UniqueFd commands_;
  UniqueFd answers_;
};

}  // namespace optstate

#endif  // OPTSTATE_TESTS_INTEGRATION_RANK_PROCESS_H_
