#include "server/session/transfer/load_round.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/session/transition_check.h"

namespace optstate::session {
namespace {

std::string DescribeBegin(const std::optional<BeginAt>& at) {
  if (!at.has_value()) return "nowhere";
  return absl::StrCat("at step ", at->step, " after ", at->loads_finished,
                      " loads");
}

}  // namespace

void LoadRound::Reset(const Layout* layout,
                      absl::Span<const RankPartition> partitions) {
  layout_ = layout;
  partitions_ = partitions;
  ranks_.assign(partitions.size(), Rank{});
  for (size_t rank = 0; rank < partitions.size(); ++rank) {
    ranks_[rank].loaded.assign(partitions[rank].pieces.size(), 0);
  }
  begun_count_ = 0;
  finished_count_ = 0;
}

void LoadRound::MoveTo(uint32_t rank, LoadPhase to) {
  LoadPhase& phase = ranks_[rank].phase;
  CheckTransition("the load of rank", rank, phase, to);
  phase = to;
}

void LoadRound::Begin(uint32_t rank) {
  DropRank(rank);
  MoveTo(rank, LoadPhase::kBegun);
  ++begun_count_;
}

void LoadRound::NoteLoaded(uint32_t rank) {
  if (ranks_[rank].phase == LoadPhase::kLoading) return;
  MoveTo(rank, LoadPhase::kLoading);
}

void LoadRound::NoteMaster(uint32_t rank, size_t piece, uint64_t begin,
                           uint64_t end) {
  const uint64_t piece_begin = partitions_[rank].pieces[piece].begin;
  uint64_t& loaded = ranks_[rank].loaded[piece];
  if (begin - piece_begin <= loaded) {
    loaded = std::max(loaded, end - piece_begin);
  }
}

absl::Status LoadRound::CheckComplete(uint32_t rank,
                                      uint32_t first_parameter) const {
  const RankPartition& partition = partitions_[rank];
  for (size_t i = partition.LowerBound(first_parameter);
       i < partition.pieces.size(); ++i) {
    const Piece& piece = partition.pieces[i];
    const uint64_t loaded = ranks_[rank].loaded[i];
    if (loaded >= piece.numel) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "master elements from ", piece.begin + loaded, " to ",
        piece.begin + piece.numel, " of parameter ", piece.parameter, " \"",
        layout_->parameters()[piece.parameter].name,
        "\" were not loaded (or not in ascending order); rank ", rank,
        " must load them before it finishes"));
  }
  return absl::OkStatus();
}

absl::Status LoadRound::CheckBeginAlike() const {
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].end.begin_at == begin_at()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks disagree: rank ", rank, " has the job begin ",
        DescribeBegin(ranks_[rank].end.begin_at), ", and rank 0 ",
        DescribeBegin(begin_at()),
        ". The job is unchanged: finish the load alike on every rank"));
  }
  return absl::OkStatus();
}

absl::Status LoadRound::CheckAlike() const {
  const auto first = std::find_if(
      ranks_.begin(), ranks_.end(),
      [](const Rank& rank) { return rank.end.content_digest != 0; });
  for (auto rank = first; rank != ranks_.end(); ++rank) {
    if (rank->end.content_digest == 0 ||
        rank->end.content_digest == first->end.content_digest) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks disagree: what rank ", rank - ranks_.begin(),
        " has loaded (of a state, or of parameters that were changed in place) "
        "is not what rank ",
        first - ranks_.begin(),
        " has loaded, in its values or in which they are of. The job is "
        "unchanged: load, or change parameters, on every rank alike"));
  }
  return CheckBeginAlike();
}

void LoadRound::Finish(uint32_t rank, uint64_t request_id, const LoadEnd& end) {
  MoveTo(rank, LoadPhase::kFinished);
  ranks_[rank].request_id = request_id;
  ranks_[rank].end = end;
  ++finished_count_;
}

void LoadRound::DropRank(uint32_t rank) {
  Rank& state = ranks_[rank];
  if (finished(rank)) --finished_count_;
  if (begun(rank)) {
    --begun_count_;
    MoveTo(rank, LoadPhase::kOut);
  }
  state.end = LoadEnd();
  state.dropped = absl::OkStatus();
  std::fill(state.loaded.begin(), state.loaded.end(), 0);
}

void LoadRound::Clear() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) DropRank(rank);
}

void LoadRound::Drop(const absl::Status& why) {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const bool goes_on = begun(rank) && !finished(rank);
    if (!begun(rank)) continue;
    DropRank(rank);
    if (goes_on) ranks_[rank].dropped = why;
  }
}

std::string LoadRound::Describe() const {
  std::string text;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!begun(rank)) continue;
    absl::StrAppend(&text, text.empty() ? "" : ", ", "rank ", rank,
                    finished(rank) ? " has finished" : " has begun");
  }
  return text;
}

}  // namespace optstate::session
