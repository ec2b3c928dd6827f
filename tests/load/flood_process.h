#ifndef OPTSTATE_TESTS_LOAD_FLOOD_PROCESS_H_
#define OPTSTATE_TESTS_LOAD_FLOOD_PROCESS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/load/flood.h"

namespace optstate::load {

// A process of another user that floods a daemon (flood_main.cc). Root alone
// can start one. The destructor kills it.
//
// Threads: one at a time.
class FloodProcess {
 public:
  enum class Kind {
    kFlood,
    kSpin,  // takes as much time of the cores, and leaves the daemon alone
  };
  struct Options {
    std::string socket;
    uid_t uid = 0;
    uint64_t seed = 0;
    size_t threads = 1;
    uint64_t rounds = 0;  // 0: until End(); always so for kSpin
    Kind kind = Kind::kFlood;
  };

  // Returns when the process has attached to a job of its own.
  // FAILED_PRECONDITION: it cannot be that user here, and why.
  static absl::StatusOr<std::unique_ptr<FloodProcess>> Start(
      const Options& options);
  ~FloodProcess();

  bool running() const { return process_.running(); }
  // Tells a process without a number of rounds to end; awaits the end of one
  // with a number.
  absl::StatusOr<FloodCounts> End();

 private:
  FloodProcess(pid_t pid, UniqueFd input, UniqueFd output);

  // Reads a line; UNAVAILABLE: there is no further one.
  absl::StatusOr<std::string> ReadLine();
  absl::Status AwaitReady();

  const Process process_;
  UniqueFd input_;
  UniqueFd output_;
};

// Returns the user who floods in tests: nobody.
uid_t FloodUid();

// Returns FAILED_PRECONDITION, and why, when this process cannot start others
// as FloodUid(): it starts one for a moment.
absl::Status CheckMayFlood();

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_FLOOD_PROCESS_H_
