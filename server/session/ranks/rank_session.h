#ifndef OPTSTATE_SERVER_SESSION_RANKS_RANK_SESSION_H_
#define OPTSTATE_SERVER_SESSION_RANKS_RANK_SESSION_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "server/session/job_types.h"

namespace optstate::session {

// The session of a rank, and what this engine knows of the rank beside its
// mark and its state. A rank that is not attached has the initial values,
// except for its committed step.
struct RankSession {
  AttachSpec spec;
  // The session's own fd of spec.gradient_segment; null: there is none.
  std::shared_ptr<const UniqueFd> gradient_segment;
  absl::Time attached_at;
  uint64_t committed_step = 0;  // the last it participated in
  // The step that was to be finished when the rank attached; 0: none.
  uint64_t recovering_step = 0;
  // The EndMicroStep that is not answered yet.
  std::optional<uint64_t> ending;
  // The rank whose drop discarded sums in which this rank participated, while
  // this rank has not dropped its own part yet.
  std::optional<uint32_t> sums_dropped_by;
  bool sums_dropped_by_loss = false;  // false: that rank aborted
  // The rank does not return when its connection ends.
  bool has_said_farewell = false;
  // The rank was aborted for another one's loss, and has made no call since.
  bool aborted_for_loss = false;
  // The answer to the rank's next commit, end of a micro-step or load, unless
  // it is OK.
  absl::Status disagreement;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_RANK_SESSION_H_
