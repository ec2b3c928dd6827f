#include "server/session/steps/open_step.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/types/status_macros.h"

namespace optstate::session {

void OpenStep::Reset(const Layout* layout,
                     absl::Span<const RankPartition> partitions,
                     bool replicated) {
  layout_ = layout;
  partitions_ = partitions;
  replicated_ = replicated;
  const size_t parameter_count = layout->parameters().size();
  ranks_.clear();
  ranks_.resize(partitions.size());
  piece_counts_.assign(parameter_count, 0);
  staged_pieces_.assign(parameter_count, 0);
  updated_.assign(parameter_count, 0);
  const bool may_lack = replicated && partitions.size() <= kPushedByRanksMax;
  pushed_by_.assign(may_lack ? parameter_count : 0, 0);
  pushed_by_used_ = {};
  size_t pieces_max = 0;
  for (size_t rank = 0; rank < partitions.size(); ++rank) {
    const auto& pieces = partitions[rank].pieces;
    for (const Piece& piece : pieces) ++piece_counts_[piece.parameter];
    pieces_max = std::max(pieces_max, pieces.size());
    ranks_[rank].micro_steps.assign(pieces.size(), kNone);
    ranks_[rank].commit.copy.Reset(layout->groups().size());
  }
  actions_.assign(pieces_max, scheduler::StageAction::kNothing);
  staged_total_ = 0;
  committed_count_ = 0;
}

absl::Status OpenStep::CheckPiece(uint32_t parameter, int64_t staged,
                                  uint32_t micro_step, bool accumulate) const {
  if (staged == kNone || staged == micro_step) return absl::OkStatus();
  const std::string& name = layout_->parameters()[parameter].name;
  if (!accumulate) {
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter ", parameter, " \"", name, "\" was pushed at micro-step ",
        staged, " of this step already, now at ", micro_step,
        "; register the job with accumulate to sum micro-steps"));
  }
  if (staged < micro_step) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "parameter ", parameter, " \"", name, "\" was pushed at micro-step ",
      staged, " already, now at ", micro_step, "; micro-steps must ascend"));
}

absl::Status OpenStep::PlanPush(uint32_t rank, uint32_t micro_step,
                                uint32_t first_parameter,
                                uint32_t end_parameter, bool accumulate,
                                Push* push) {
  Rank& state = ranks_[rank];
  const auto& pieces = partitions_[rank].pieces;
  const size_t first = partitions_[rank].LowerBound(first_parameter);
  const size_t end = partitions_[rank].LowerBound(end_parameter);
  for (size_t i = first; i < end; ++i) {
    OPTSTATE_RETURN_IF_ERROR(CheckPiece(
        pieces[i].parameter, state.micro_steps[i], micro_step, accumulate));
  }
  for (size_t i = first; i < end; ++i) {
    const int64_t staged = state.micro_steps[i];
    scheduler::StageAction& action = actions_[i - first];
    // A repeat changes nothing. Without accumulation the gradient is used in
    // place, so its statistics follow the present content.
    action = accumulate && staged == micro_step
                 ? scheduler::StageAction::kNothing
                 : scheduler::StageAction::kStage;
    NoteStaged(rank, i, micro_step);
    const uint32_t p = pieces[i].parameter;
    if (replicated_ && staged_pieces_[p] != piece_counts_[p]) {
      action = scheduler::StageAction::kNothing;
    }
  }
  push->first_piece = first;
  push->actions = absl::MakeConstSpan(actions_).first(end - first);
  return absl::OkStatus();
}

void OpenStep::NoteStaged(uint32_t rank, size_t piece, uint32_t micro_step) {
  Rank& state = ranks_[rank];
  if (state.micro_steps[piece] == kNone) {
    ++staged_pieces_[partitions_[rank].pieces[piece].parameter];
    ++state.staged;
    ++staged_total_;
  }
  state.micro_steps[piece] = micro_step;
}

std::vector<StagedRange> OpenStep::StagedRanges(uint32_t rank) const {
  std::vector<StagedRange> ranges;
  const auto& micro_steps = ranks_[rank].micro_steps;
  for (uint32_t i = 0; i < micro_steps.size(); ++i) {
    if (micro_steps[i] == kNone) continue;
    const auto micro_step = static_cast<uint32_t>(micro_steps[i]);
    if (!ranges.empty() && ranges.back().micro_step == micro_step &&
        ranges.back().first_piece + ranges.back().piece_count == i) {
      ++ranges.back().piece_count;
    } else {
      ranges.push_back({i, 1, micro_step});
    }
  }
  return ranges;
}

void OpenStep::NoteCommit(uint32_t rank, uint64_t request_id,
                          const CommitSpec& spec) {
  RankCommit& commit = ranks_[rank].commit;
  commit.committed = true;
  commit.request_id = request_id;
  commit.copy.Note(spec);
  ++committed_count_;
}

absl::Span<const uint8_t> OpenStep::CommittedParameters() {
  for (uint32_t p = 0; p < updated_.size(); ++p) {
    updated_[p] = IsWhole(p) ? 1 : 0;
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].commit.committed) continue;
    for (const Piece& piece : partitions_[rank].pieces) {
      updated_[piece.parameter] = 0;
    }
  }
  return updated_;
}

absl::Status OpenStep::ResolveParameters(absl::Span<const uint8_t>* updated) {
  bool has_partly = false;
  for (uint32_t p = 0; p < updated_.size(); ++p) {
    const bool is_partly =
        staged_pieces_[p] != 0 && staged_pieces_[p] != piece_counts_[p];
    has_partly |= is_partly;
    if (is_partly && !MayLackGradients()) {
      return absl::FailedPreconditionError(absl::StrCat(
          staged_pieces_[p], " of ", piece_counts_[p], " pieces of parameter ",
          p, " \"", layout_->parameters()[p].name,
          "\" were pushed: all ranks that own a part of it must push, or none; "
          "what was staged is dropped, push and commit the step again"));
    }
    updated_[p] = staged_pieces_[p] != 0 ? 1 : 0;
  }
  pushed_by_used_ = {};
  if (has_partly) {
    for (uint32_t p = 0; p < updated_.size(); ++p) pushed_by_[p] = PushedBy(p);
    pushed_by_used_ = pushed_by_;
  }
  *updated = updated_;
  return absl::OkStatus();
}

// Returns the ranks that pushed a parameter; replicated, a piece is a whole
// parameter.
uint64_t OpenStep::PushedBy(uint32_t parameter) const {
  uint64_t ranks = 0;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].micro_steps[parameter] != kNone) {
      ranks |= uint64_t{1} << rank;
    }
  }
  return ranks;
}

absl::Span<const scheduler::StageAction> OpenStep::PlanPartly() {
  for (uint32_t p = 0; p < updated_.size(); ++p) {
    const bool is_partly =
        staged_pieces_[p] != 0 && staged_pieces_[p] != piece_counts_[p];
    actions_[p] = is_partly ? scheduler::StageAction::kStage
                            : scheduler::StageAction::kNothing;
  }
  return absl::MakeConstSpan(actions_).first(updated_.size());
}

void OpenStep::DropPieces(uint32_t rank) {
  Rank& state = ranks_[rank];
  if (state.staged == 0) return;
  const auto& pieces = partitions_[rank].pieces;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (state.micro_steps[i] == kNone) continue;
    state.micro_steps[i] = kNone;
    --staged_pieces_[pieces[i].parameter];
  }
  staged_total_ -= state.staged;
  state.staged = 0;
}

void OpenStep::DropRank(uint32_t rank) {
  DropPieces(rank);
  if (!ranks_[rank].commit.committed) return;
  ranks_[rank].commit.committed = false;
  --committed_count_;
}

void OpenStep::DropAll() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) DropRank(rank);
}

std::string OpenStep::Describe() const {
  constexpr size_t kNamedMax = 8;
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].commit.committed) missing.push_back(rank);
  }
  if (missing.empty()) return "all ranks have committed";
  std::string ranks = absl::StrJoin(
      absl::MakeConstSpan(missing).first(std::min(missing.size(), kNamedMax)),
      ", ");
  if (missing.size() > kNamedMax) {
    absl::StrAppend(&ranks, " and ", missing.size() - kNamedMax, " more");
  }
  return missing.size() == 1
             ? absl::StrCat("rank ", ranks, " has not committed")
             : absl::StrCat("ranks ", ranks, " have not committed");
}

}  // namespace optstate::session
