#ifndef OPTSTATE_SERVER_SESSION_STEPS_MICRO_STEPS_H_
#define OPTSTATE_SERVER_SESSION_STEPS_MICRO_STEPS_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "server/scheduler/step_scheduler.h"

namespace optstate::session {

// Tracks the ranks' progress in the micro-steps of the open step, in a job
// whose engine both reduces and accumulates, to find what can be summed. Pure
// bookkeeping.
//
// A rank is past micro-step m when it has ended it, has pushed something of a
// later one, or has committed. Micro-step m of a parameter is whole when each
// rank has pushed it or is past it: then the gradients of the ranks that have
// pushed it are summed, in order of the ranks, and the sum is added to the
// accumulator. So a rank without a gradient adds nothing, and what is summed
// depends on what the ranks push, never on when.
//
// A rank that ends a micro-step waits for the others, which may be behind: they
// catch up, because all that they wait for is what this rank did before. No
// rank waits in a push.
//
// Invariant: of a parameter each rank has at most one gradient that is not
// summed yet, the one in its gradient area; waiting(rank) counts these.
// Threads: not thread-safe; the job's lock guards it. Allocates in Reset and in
// errors alone.
class MicroSteps {
 public:
  static constexpr int64_t kNone = -1;
  // The value of past() for a rank that pushes no more.
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

  // Forgets everything and takes the sizes of a job; `layout` must live until
  // the next Reset or this object's end. Without ranks, the size is zero.
  void Reset(const Layout* layout, uint32_t world_size);

  // Returns FAILED_PRECONDITION: the rank is past this micro-step, or one of
  // the parameters [first, end) has a gradient of a former one that is not
  // summed.
  absl::Status CheckPush(uint32_t rank, uint32_t micro_step, uint32_t first,
                         uint32_t end) const;
  // Notes a push that was checked. A repeat changes nothing.
  void NotePush(uint32_t rank, uint32_t micro_step, uint32_t first,
                uint32_t end);
  // Notes that the rank is past micro-steps [0, end); returns whether that is
  // new.
  bool NotePast(uint32_t rank, int64_t end);
  int64_t past(uint32_t rank) const { return past_[rank]; }

  // Picks those of the parameters [first, end) that are whole at the lowest
  // micro-step at which any is whole, notes them as summed, and returns that
  // micro-step; kNone: nothing is whole. `actions`, by parameter from `first`,
  // is valid until the next call. Until then HasPushed() says which ranks'
  // gradients make the sums.
  int64_t TakeWhole(uint32_t first, uint32_t end,
                    absl::Span<const scheduler::StageAction>* actions);
  bool HasPushed(uint32_t rank, uint32_t parameter, int64_t micro_step) const {
    return pushed(rank, parameter) == micro_step;
  }

  // Notes that the accumulator, from a former engine, has all up to this
  // micro-step.
  void NoteSummed(uint32_t parameter, uint32_t micro_step);
  // Returns the last micro-step of the parameter in the accumulator, or kNone.
  int64_t summed(uint32_t parameter) const { return summed_[parameter]; }
  // Returns, by parameter, 1 when a gradient of the parameter is summed.
  absl::Span<const uint8_t> SummedParameters();
  bool any_summed() const { return summed_count_ > 0; }

  // Returns the number of the rank's gradients that are not summed yet.
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
  std::vector<scheduler::StageAction> actions_;
  uint64_t waiting_count_ = 0;
  uint64_t summed_count_ = 0;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_MICRO_STEPS_H_
