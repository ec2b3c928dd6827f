#ifndef OPTSTATE_SERVER_SESSION_RANKS_RANK_LOSSES_H_
#define OPTSTATE_SERVER_SESSION_RANKS_RANK_LOSSES_H_

#include <bitset>
#include <cstdint>

#include "server/session/job_context.h"
#include "server/session/ranks/loss_state.h"

namespace optstate::session {

// The losses of ranks. A rank's mark says at which step it was lost and whether
// that is acknowledged; a loss is notified in one engine, and the next one
// notifies it again unless it is acknowledged.
//
// Threads: not thread-safe; the job's lock guards it.
class RankLosses {
 public:
  // `job` must outlive this object.
  explicit RankLosses(JobContext* job) : job_(*job) {}

  // Forgets what this engine has notified; the marks stay.
  void Reset() { notified_.reset(); }
  LossState state(uint32_t rank) const;
  // Returns whether the rank was lost in an open step, and that is not
  // acknowledged.
  bool IsUnacknowledged(uint32_t rank) const;

  // The transitions. One that the table lacks ends the process.
  //
  // Notes the loss of a rank; `step`: the next one, or the one that is being
  // finished. The loss of a rank that was lost before begins anew.
  void Note(uint32_t rank, uint64_t step, bool in_open_step);
  // Notes that a waiting rank was aborted for the loss.
  void NoteNotified(uint32_t rank);
  void NoteAcknowledged(uint32_t rank);
  // Notes that the rank is attached, or that no rank is left to wait for it.
  // No effect when it is not lost.
  void Forget(uint32_t rank);

 private:
  void CheckMayBecome(uint32_t rank, LossState to) const;

  JobContext& job_;
  std::bitset<kWorldSizeMax> notified_;  // by rank that was lost
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_RANK_LOSSES_H_
