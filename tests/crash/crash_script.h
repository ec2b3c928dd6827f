#ifndef OPTSTATE_TESTS_CRASH_CRASH_SCRIPT_H_
#define OPTSTATE_TESTS_CRASH_CRASH_SCRIPT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
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

  const LayoutSpec& layout() const { return layout_; }

  // Loads parameters; on every rank the same.
  absl::Status Load(client::Session& session) const;
  // Pushes and commits the step, and fetches some state after every third one;
  // tells the board where it is.
  absl::Status RunStep(client::Session& session, uint64_t step, uint32_t rank,
                       RankBoard* board) const;

 private:
  const void* Gradient(uint64_t step, uint32_t micro_step,
                       uint32_t parameter) const;
  const void* InfiniteGradient(uint32_t parameter) const;
  absl::Status Push(client::Session& session, uint64_t step,
                    uint32_t micro_step) const;
  client::CommitOptions Commit(uint64_t step, uint32_t rank) const;
  absl::Status Fetch(client::Session& session, uint64_t step) const;

  const Scenario scenario_;
  const LayoutSpec layout_;
  size_t noise_elements_ = 0;  // then one that is infinite
  std::map<DType, std::vector<std::byte>> noise_;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_CRASH_SCRIPT_H_
