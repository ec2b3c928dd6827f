#ifndef OPTSTATE_TESTS_CRASH_CRASH_SCRIPT_H_
#define OPTSTATE_TESTS_CRASH_CRASH_SCRIPT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"
#include "proto/types/layout.h"
#include "tests/crash/rank_board.h"
#include "tests/crash/scenario.h"

namespace optstate::crash {

// Takes the steps of a scenario. Gradients are windows into one array of noise,
// so that making them takes no time in which nothing can be killed.
class CrashScript {
 public:
  explicit CrashScript(const Scenario& scenario);

  const Scenario& scenario() const { return scenario_; }
  // Returns the options of one rank's session.
  client::SessionOptions Options(const std::string& endpoint,
                                 const std::string& job, uint32_t rank) const;

  // Loads parameters; they are the same on every rank.
  absl::Status Load(client::Session& session) const;
  // Loads, after some steps and on every rank, parameters and state that the
  // steps did not leave: also in a process that comes to take a rank's place,
  // unless the load is the job's already; again when it is given up for a lost
  // rank. No effect after other steps.
  absl::Status LoadAfter(client::Session& session, uint64_t step,
                         RankBoard* board) const;
  // Pushes and commits the step, again when what was staged is lost, loads
  // after it, and fetches some state after every third one; tells the board
  // where it is.
  absl::Status RunStep(client::Session& session, uint64_t step, uint32_t rank,
                       RankBoard* board) const;

 private:
  // Returns a budget that has room for a few records.
  uint64_t FramesBytes() const;
  // Returns whose gradients are pushed: each rank's own where the engine sums
  // them, else a common source, for ranks push parts of the same.
  uint64_t Source(uint32_t rank) const;
  const void* Gradient(uint64_t step, uint32_t micro_step, uint32_t parameter,
                       uint32_t rank) const;
  const void* InfiniteGradient(uint32_t parameter) const;
  bool HasGradient(uint64_t step, uint32_t micro_step, uint32_t parameter,
                   uint32_t rank) const;
  absl::Status Push(client::Session& session, uint64_t step,
                    uint32_t micro_step, uint32_t rank) const;
  double GradScale(const client::Session& session, uint64_t step) const;
  client::CommitOptions Commit(const client::Session& session, uint64_t step,
                               uint32_t rank) const;
  absl::Status PushAndCommit(client::Session& session, uint64_t step,
                             uint32_t rank, RankBoard* board) const;
  absl::Status Fetch(client::Session& session, uint64_t step) const;
  absl::StatusOr<bool> IsLoadedAfter(client::Session& session,
                                     uint64_t step) const;
  absl::Status LoadOnce(client::Session& session, uint64_t step) const;

  const Scenario scenario_;
  const LayoutSpec layout_;
  size_t noise_elements_ = 0;  // then one that is infinite
  std::map<DType, std::vector<std::byte>> noise_;
  std::vector<std::byte> zeros_;  // floats, of the largest parameter
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_CRASH_SCRIPT_H_
