#ifndef OPTSTATE_SERVER_SESSION_RANKS_RANK_ROSTER_H_
#define OPTSTATE_SERVER_SESSION_RANKS_RANK_ROSTER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/session/job_context.h"
#include "server/session/job_types.h"
#include "server/session/ranks/former_rank.h"
#include "server/session/ranks/rank_losses.h"
#include "server/session/ranks/rank_session.h"
#include "server/session/ranks/rank_state.h"

namespace optstate::session {

// The ranks of a job: the state of each, and its session. The ranks'
// marks (storage/format/rank_mark.h) tell the next engine what it has to know:
// a rank that has no session is awaited when its mark says that it was
// attached.
//
// Threads: not thread-safe; the job's lock guards it.
// Size: the transitions of a rank, and one short question for each fact of it.
// Losses are a thing of their own (RankLosses).
class RankRoster {
 public:
  // The arguments must outlive this object.
  explicit RankRoster(JobContext* job) : job_(*job), losses_(job) {}

  // Begins anew with the ranks of the present shape, none of them attached.
  void Reset(uint32_t world_size);
  // Forgets all ranks; their marks stay.
  void Clear();
  uint32_t size() const { return static_cast<uint32_t>(ranks_.size()); }
  RankSession& session(uint32_t rank) { return ranks_[rank].session; }
  const RankSession& session(uint32_t rank) const {
    return ranks_[rank].session;
  }
  RankLosses& losses() { return losses_; }
  RankState state(uint32_t rank) const;

  // The transitions. One that the table lacks ends the process. Each changes
  // the rank's mark in an order from which the next engine can go on.
  //
  // Begins a session, which CheckAttach permits, and forgets the rank's loss.
  void Attach(const AttachSpec& spec);
  // Ends the session of a rank that is to return. It must have identified
  // itself (client_instance).
  void Await(uint32_t rank);
  // Ends the session of a rank that does not return, or gives an awaited rank
  // up.
  void Leave(uint32_t rank);

  // Returns where the rank's gradients lie; null: not known.
  const std::byte*& gradient_area(uint32_t rank) {
    return gradient_areas_[rank];
  }
  absl::Span<const std::byte* const> gradient_areas() const {
    return gradient_areas_;
  }

  // Returns whether a rank has been attached, to this engine or the former one.
  bool had_session() const { return had_session_; }
  void NoteHadSession() { had_session_ = true; }

  absl::Status CheckAttached(uint32_t rank) const;
  uint32_t AttachedCount() const;
  uint32_t AwaitedCount() const;
  std::vector<FormerRank> Awaited() const;
  // Returns whether the rank is awaited within a step, and its process, which
  // is not `by`, runs.
  bool IsHeld(uint32_t rank, const RankProcess& by) const;
  absl::Status HeldError(uint32_t rank) const;
  absl::Status CheckNoneHeld(const RankProcess& by) const;
  // Returns whether the instance of `spec` is the rank's last attached one, in
  // this engine or a former one.
  bool WasAttachedLast(const AttachSpec& spec) const;
  // Returns whether some rank has staged for the step, in this engine or a
  // former one.
  bool WasBegun(uint64_t step) const;

  void NoteCommittedStep(uint64_t step);

  // Answers a request of the rank, which must be attached.
  void Answer(uint32_t rank, uint64_t request_id, const absl::Status& status,
              const StepOutcome& outcome) const;
  void Notify(uint32_t rank, const std::string& text) const;

 private:
  struct Rank {
    bool has_session = false;
    RankSession session;
  };

  void CheckMayBecome(uint32_t rank, RankState to) const;
  uint32_t Count(RankState which) const;

  JobContext& job_;
  RankLosses losses_;
  std::vector<Rank> ranks_;                       // by rank
  std::vector<const std::byte*> gradient_areas_;  // by rank
  bool had_session_ = false;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_RANK_ROSTER_H_
