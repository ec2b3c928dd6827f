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
#include "server/session/ranks/rank_session.h"

namespace optstate {

// The ranks of a job: which are attached, in which session, and which are away
// and awaited. What the next engine has to know stands in the ranks' marks
// (storage/format/rank_mark.h).
//
// Threads: not thread-safe; the job's lock guards it.
class RankRoster {
 public:
  // The arguments must outlive this object.
  explicit RankRoster(JobContext* job) : job_(*job) {}

  // Begins anew with the ranks of the present shape, none of them attached.
  void Reset(uint32_t world_size);
  // Forgets all ranks; their marks stay.
  void Clear();
  uint32_t size() const { return static_cast<uint32_t>(sessions_.size()); }
  RankSession& session(uint32_t rank) { return sessions_[rank]; }
  const RankSession& session(uint32_t rank) const { return sessions_[rank]; }

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
  // Returns whether the rank is away and is to return by itself.
  bool IsAwaited(uint32_t rank) const;
  uint32_t AwaitedCount() const;
  std::vector<FormerRank> Awaited() const;
  // Returns whether the rank is away within a step, and its process, which is
  // not `by`, runs and is to return.
  bool IsHeld(uint32_t rank, const RankProcess& by) const;
  absl::Status HeldError(uint32_t rank) const;
  absl::Status CheckNoneHeld(const RankProcess& by) const;
  // Returns whether the instance of `spec` is the rank's last attached one, in
  // this engine or a former one.
  bool WasAttachedLast(const AttachSpec& spec) const;
  // Returns whether some rank has staged for the step, in this engine or a
  // former one.
  bool WasBegun(uint64_t step) const;

  void MarkAttached(const AttachSpec& spec);
  void ForgetLoss(uint32_t rank);
  void NoteCommittedStep(uint64_t step);

  // Answers a request of the rank, which must be attached.
  void Answer(uint32_t rank, uint64_t request_id, const absl::Status& status,
              const StepOutcome& outcome) const;
  void Notify(uint32_t rank, const std::string& text) const;

 private:
  JobContext& job_;
  std::vector<RankSession> sessions_;             // by rank
  std::vector<const std::byte*> gradient_areas_;  // by rank
  bool had_session_ = false;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_RANKS_RANK_ROSTER_H_
