#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_ROUND_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_ROUND_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/load_end.h"
#include "proto/types/partition.h"
#include "server/session/transfer/load_phase.h"

namespace optstate::session {

// Tracks which ranks participate in a load and the progress of each, from the
// first rank's begin to the last rank's finish. Pure bookkeeping.
//
// Threads: not thread-safe; the job's lock guards it.
class LoadRound {
 public:
  // Forgets everything and takes the sizes of a job. Both arguments must live
  // until the next Reset or this object's end.
  void Reset(const Layout* layout, absl::Span<const RankPartition> partitions);

  // Returns true from the first begin until Clear, unless all ranks that began
  // have left.
  bool active() const { return begun_count_ > 0; }
  bool begun(uint32_t rank) const {
    return ranks_[rank].phase != LoadPhase::kOut;
  }
  bool finished(uint32_t rank) const {
    return ranks_[rank].phase == LoadPhase::kFinished;
  }
  uint64_t request_id(uint32_t rank) const { return ranks_[rank].request_id; }
  bool all_finished() const { return finished_count_ == ranks_.size(); }

  // Starts the rank's load, anew if it had begun.
  void Begin(uint32_t rank);
  // Returns whether the rank has loaded something since it began.
  bool has_loaded(uint32_t rank) const {
    return ranks_[rank].phase > LoadPhase::kBegun;
  }
  // Notes that the rank, which has begun and not finished, loads something.
  void NoteLoaded(uint32_t rank);
  // Notes masters [begin, end) of a piece of the rank.
  void NoteMaster(uint32_t rank, size_t piece, uint64_t begin, uint64_t end);
  // Returns FAILED_PRECONDITION, naming the first, when masters of the rank's
  // pieces of parameters [first_parameter, count) were not loaded. Only loads
  // in ascending order count.
  absl::Status CheckComplete(uint32_t rank, uint32_t first_parameter) const;
  void Finish(uint32_t rank, uint64_t request_id, const LoadEnd& end);
  // Returns FAILED_PRECONDITION, naming two ranks, when ranks that were to load
  // the same content have not, or have the job begin elsewhere. All ranks must
  // have finished.
  absl::Status CheckAlike() const;
  // Returns where the job begins, once all ranks have finished alike.
  const std::optional<BeginAt>& begin_at() const {
    return ranks_.front().end.begin_at;
  }
  // Marks a rank that is gone or starts anew as neither begun nor finished.
  void DropRank(uint32_t rank);
  void Clear();
  // Ends the round before all have finished. Ranks that had begun and wait for
  // no answer are notified in their next call.
  void Drop(const absl::Status& why);
  // Returns an error while the rank's load was dropped, and it has not begun
  // another one.
  const absl::Status& dropped(uint32_t rank) const {
    return ranks_[rank].dropped;
  }
  // Returns a text for operators: "rank 0 has begun, rank 1 has finished".
  std::string Describe() const;

 private:
  struct Rank {
    LoadPhase phase = LoadPhase::kOut;
    uint64_t request_id = 0;
    LoadEnd end;
    absl::Status dropped;
    std::vector<uint64_t> loaded;  // by piece: elements from its begin
  };

  absl::Status CheckBeginAlike() const;
  // Makes a transition, which must be one of the table.
  void MoveTo(uint32_t rank, LoadPhase to);

  const Layout* layout_ = nullptr;
  absl::Span<const RankPartition> partitions_;
  std::vector<Rank> ranks_;
  uint32_t begun_count_ = 0;
  uint32_t finished_count_ = 0;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_ROUND_H_
