#ifndef OPTSTATE_SERVER_SESSION_STEPS_OPEN_STEP_H_
#define OPTSTATE_SERVER_SESSION_STEPS_OPEN_STEP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "server/scheduler/step_scheduler.h"
#include "server/session/job_types.h"
#include "server/session/steps/commit_copy.h"

namespace optstate::session {

// Tracks what has arrived of the open step: which pieces were pushed, at which
// micro-step, and the ranks' commits. Pure bookkeeping, no arithmetic.
//
// Invariant: staged_pieces(p) is the number of pieces of p whose micro-step is
// not kNone, over all ranks.
// Threads: not thread-safe; the job's lock guards it. Allocates only in Reset
// and in errors.
class OpenStep {
 public:
  // When a parameter is replicated on more ranks, all must push a gradient.
  static constexpr size_t kPushedByRanksMax = 64;

  struct RankCommit {
    bool committed = false;
    uint64_t request_id = 0;
    CommitCopy copy;
    const CommitSpec& spec() const { return copy.spec(); }
  };

  // Forgets everything and takes the sizes of a job. `layout` and `partitions`
  // must live until the next Reset or this object's end.
  void Reset(const Layout* layout, absl::Span<const RankPartition> partitions,
             bool replicated);

  // Returns true when a rank has staged or committed something.
  bool any() const { return staged_total_ > 0 || committed_count_ > 0; }

  // Decides what a push does with each of the rank's pieces of the parameters,
  // and notes them as staged. When replicated, only pieces that all ranks have
  // pushed by then get an action. FAILED_PRECONDITION, with nothing noted: a
  // piece was already pushed at a later micro-step, or at another one and the
  // job does not accumulate.
  struct Push {
    size_t first_piece = 0;
    // The actions of the push; valid until the next PlanPush.
    absl::Span<const scheduler::StageAction> actions;
  };
  absl::Status PlanPush(uint32_t rank, uint32_t micro_step,
                        uint32_t first_parameter, uint32_t end_parameter,
                        bool accumulate, Push* push);

  // Notes a piece as staged, by a push or by a former engine.
  void NoteStaged(uint32_t rank, size_t piece, uint32_t micro_step);

  // Notes a commit whose content was checked.
  void NoteCommit(uint32_t rank, uint64_t request_id, const CommitSpec& spec);
  const RankCommit& commit(uint32_t rank) const { return ranks_[rank].commit; }
  bool all_committed() const { return committed_count_ == ranks_.size(); }

  // Returns whether all pieces of the parameter are staged.
  bool IsWhole(uint32_t parameter) const {
    return staged_pieces_[parameter] != 0 &&
           staged_pieces_[parameter] == piece_counts_[parameter];
  }
  // Returns, by parameter, 1 when all its pieces are staged, by ranks that have
  // committed.
  absl::Span<const uint8_t> CommittedParameters();
  // Sets, by parameter, 1 when all its pieces are staged, 0 when none is.
  // FAILED_PRECONDITION, naming the first, when some but not all are; in a
  // replicated job of at most kPushedByRanksMax ranks, some are enough.
  absl::Status ResolveParameters(absl::Span<const uint8_t>* updated);
  // Returns, after ResolveParameters, by parameter, bit r: rank r has pushed
  // it. Empty when all ranks have pushed all updated parameters.
  absl::Span<const uint64_t> pushed_by() const { return pushed_by_used_; }
  // Returns, after ResolveParameters and where pushed_by() is not empty, the
  // parameters still to be staged because some ranks have not pushed them.
  absl::Span<const scheduler::StageAction> PlanPartly();

  // Drops what the rank staged and its commit.
  void DropRank(uint32_t rank);
  // Drops everything; the step can be taken again, or the next one.
  void DropAll();

  uint32_t staged_pieces(uint32_t parameter) const {
    return staged_pieces_[parameter];
  }
  uint64_t staged_by(uint32_t rank) const { return ranks_[rank].staged; }
  // Returns whether the rank has staged or committed something.
  bool opened_by(uint32_t rank) const {
    return ranks_[rank].staged > 0 || ranks_[rank].commit.committed;
  }
  // Returns the rank's staged pieces, ascending.
  std::vector<StagedRange> StagedRanges(uint32_t rank) const;
  // Returns a text for operators, to follow the step's number: "rank 1 has not
  // committed".
  std::string Describe() const;

 private:
  static constexpr int64_t kNone = -1;

  struct Rank {
    std::vector<int64_t> micro_steps;  // by piece: the last staged, or kNone
    uint64_t staged = 0;               // pieces
    RankCommit commit;
  };

  absl::Status CheckPiece(uint32_t parameter, int64_t staged,
                          uint32_t micro_step, bool accumulate) const;
  void DropPieces(uint32_t rank);
  bool MayLackGradients() const { return !pushed_by_.empty(); }
  uint64_t PushedBy(uint32_t parameter) const;

  const Layout* layout_ = nullptr;
  absl::Span<const RankPartition> partitions_;
  bool replicated_ = false;
  std::vector<Rank> ranks_;
  std::vector<uint32_t> piece_counts_;   // by parameter
  std::vector<uint32_t> staged_pieces_;  // by parameter
  std::vector<uint8_t> updated_;         // by parameter
  std::vector<uint64_t> pushed_by_;      // by parameter, when replicated
  absl::Span<const uint64_t> pushed_by_used_;
  std::vector<scheduler::StageAction> actions_;
  uint64_t staged_total_ = 0;
  uint32_t committed_count_ = 0;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_OPEN_STEP_H_
