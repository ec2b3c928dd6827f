#ifndef OPTSTATE_TESTS_CRASH_RANK_BOARD_H_
#define OPTSTATE_TESTS_CRASH_RANK_BOARD_H_

#include <atomic>
#include <cstdint>

namespace optstate::crash {

// The present activity of a rank, in a page that it shares with the process
// that kills it.
enum class RankPhase : uint32_t { kOther, kPush, kCommit, kFetch, kLoad };

struct RankBoard {
  std::atomic<RankPhase> phase = RankPhase::kOther;
  // The number of times that the rank, and those whose place it took, were told
  // to run a step again.
  std::atomic<uint64_t> steps_again = 0;
  // The last step whose commit was answered.
  std::atomic<uint64_t> answered_step = 0;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_RANK_BOARD_H_
