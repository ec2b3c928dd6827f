#ifndef OPTSTATE_TESTS_CRASH_RANK_BOARD_H_
#define OPTSTATE_TESTS_CRASH_RANK_BOARD_H_

#include <atomic>
#include <cstdint>

namespace optstate::crash {

// What a rank is doing just now, in a page that it shares with whoever kills
// it.
enum class RankPhase : uint32_t { kOther, kPush, kCommit, kFetch, kLoad };

struct RankBoard {
  std::atomic<RankPhase> phase = RankPhase::kOther;
  // How often the rank, and those whose place it took, were told to run a step
  // again.
  std::atomic<uint64_t> steps_again = 0;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_RANK_BOARD_H_
