#ifndef OPTSTATE_SERVER_SESSION_MICRO_STEPS_H_
#define OPTSTATE_SERVER_SESSION_MICRO_STEPS_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "server/scheduler/step_scheduler.h"

namespace optstate {

// How far the ranks are with the micro-steps of the open step, in a job whose
// engine both reduces and accumulates: what can be summed. Pure bookkeeping.
//
// A rank is past micro-step m when it has ended it, has pushed something of a
// later one, or has committed. Micro-step m of a parameter is whole when each
// rank has pushed it or is past it: then the gradients of those that have
// pushed it are summed, in order of the ranks, and the sum is added to the
// accumulator. So a rank without a gradient adds nothing, and what is summed
// depends on what the ranks push, never on when.
//
// A rank waits for the others in ending a micro-step, and they may be behind
// it: they catch up, for all that they wait for is what it did before. In a
// push nobody waits.
//
// Invariant: of a parameter each rank has at most one gradient that is not
// summed yet, the one in its gradient area; waiting(rank) of these there are.
// Threads: not thread-safe; the job's lock guards it. Allocates in Reset and in
// errors alone.
class MicroSteps {
 public:
  static constexpr int64_t kNone = -1;
  // Of a rank that pushes no more.
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

  // Forgets everything and takes the sizes of a job; `layout` outlives this or
  // the next Reset. Without ranks it has no size.
  void Reset(const Layout* layout, uint32_t world_size);

  // FAILED_PRECONDITION: the rank is past this micro-step, or one of the
  // parameters [first, end) has a gradient of a former one that is not summed.
  absl::Status CheckPush(uint32_t rank, uint32_t micro_step, uint32_t first,
                         uint32_t end) const;
  // Of a push that was checked. A repeat changes nothing.
  void NotePush(uint32_t rank, uint32_t micro_step, uint32_t first,
                uint32_t end);
  // The rank is past micro-steps [0, end); returns whether that is new.
  bool NotePast(uint32_t rank, int64_t end);
  int64_t past(uint32_t rank) const { return past_[rank]; }

  // Picks those of the parameters [first, end) that are whole at the lowest
  // micro-step that any of them is whole at, which it returns, and notes them
  // as summed; kNone: nothing is whole. `actions`, by parameter from `first`,
  // is valid until the next call. Until then HasPushed() says whose gradients
  // make the sums.
  int64_t TakeWhole(uint32_t first, uint32_t end,
                    absl::Span<const StageAction>* actions);
  bool HasPushed(uint32_t rank, uint32_t parameter, int64_t micro_step) const {
    return pushed(rank, parameter) == micro_step;
  }

  // Of a former engine: the accumulator has all up to this micro-step.
  void NoteSummed(uint32_t parameter, uint32_t micro_step);
  // Up to which micro-step the accumulator has the parameter, or kNone.
  int64_t summed(uint32_t parameter) const { return summed_[parameter]; }
  // By parameter: 1 when something of it is summed.
  absl::Span<const uint8_t> SummedParameters();
  bool any_summed() const { return summed_count_ > 0; }

  // The rank's gradients that are not summed yet.
  uint64_t waiting(uint32_t rank) const { return waiting_[rank]; }

  // Forgets what the rank has pushed; nothing is summed.
  void DropRank(uint32_t rank);
  // Forgets everything.
  void DropAll();

 private:
  int64_t pushed(uint32_t rank, uint32_t parameter) const {
    return pushed_[rank * summed_.size() + parameter];
  }
  int64_t& pushed(uint32_t rank, uint32_t parameter) {
    return pushed_[rank * summed_.size() + parameter];
  }
  bool IsWaiting(uint32_t rank, uint32_t parameter) const {
    return pushed(rank, parameter) > summed_[parameter];
  }
  uint32_t world_size() const { return static_cast<uint32_t>(past_.size()); }
  int64_t WholeOf(uint32_t parameter) const;
  void Sum(uint32_t parameter, int64_t micro_step);

  const Layout* layout_ = nullptr;
  std::vector<int64_t> pushed_;    // by rank, by parameter; or kNone
  std::vector<int64_t> past_;      // by rank: past [0, this)
  std::vector<uint64_t> waiting_;  // by rank
  std::vector<int64_t> summed_;    // by parameter; or kNone
  std::vector<uint8_t> updated_;   // by parameter
  std::vector<int64_t> whole_;     // by parameter, in TakeWhole
  std::vector<StageAction> actions_;
  uint64_t waiting_count_ = 0;
  uint64_t summed_count_ = 0;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_MICRO_STEPS_H_
