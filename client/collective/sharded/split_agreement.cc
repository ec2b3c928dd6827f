#include "client/collective/sharded/split_agreement.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/collective/gather.h"
#include "client/collective/nodes/settling.h"
#include "proto/types/status_macros.h"
#include "proto/types/step_verdict.h"

namespace optstate::client {
namespace {

StepVerdict VerdictAbout(const Outcome& prepared, Verdict verdict) {
  return {.step = prepared.step,
          .digest = prepared.digest,
          .verdict = verdict,
          .gradient_norm = 0,
          .clip_coefficient = 1};
}

}  // namespace

SplitAgreement::SplitAgreement(Collective* collective, const Places* places)
    : collective_(*collective), places_(*places) {
  const std::vector<std::string>& nodes = places_.nodes();
  for (uint32_t node = 0; node < nodes.size(); ++node) kinds_.push_back(node);
  for (uint32_t rank = 0; rank < collective_.world_size(); ++rank) {
    const auto found =
        std::find(nodes.begin(), nodes.end(), places_.name_of(rank));
    kinds_of_ranks_.push_back(static_cast<uint32_t>(found - nodes.begin()));
  }
}

absl::Status SplitAgreement::Settle(const SessionOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(SettleNodes(collective_, places_, options, kinds_));
  undecided_ = 0;
  return absl::OkStatus();
}

absl::Status SplitAgreement::CheckDecided(const Session& session) {
  if (session.committed_step() >= undecided_) undecided_ = 0;
  if (undecided_ == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "what all nodes decided about step ", undecided_, " is not known on ",
      places_.node_name(),
      ", or has not reached its daemon: start all ranks of all nodes again, "
      "and Settle() brings the decision"));
}

absl::StatusOr<Outcome> SplitAgreement::Take(
    Session& session, const absl::StatusOr<Outcome>& prepared,
    const NodesNorm& norm) {
  if (is_split() && undecided_ == 0) undecided_ = session.committed_step() + 1;
  const absl::StatusOr<Votes> votes =
      GatherVotes(collective_, prepared, /*loaded=*/0);
  if (!votes.ok()) return UndecidedError(prepared, votes.status());
  const Verdict verdict = DecideVotes(*votes, kinds_of_ranks_);
  if (verdict == Verdict::kAbort) return Drop(session, prepared, *votes);
  // All ranks have voted, so this one has prepared the step.
  absl::StatusOr<Outcome> taken = prepared;
  if (verdict == Verdict::kCommit && is_split()) {
    taken = NoteNorm(session, *prepared, norm);
    OPTSTATE_RETURN_IF_ERROR(taken.status());
  }
  if (taken->prepared) taken = session.Decide(VerdictAbout(*taken, verdict));
  if (taken.ok()) undecided_ = 0;
  OPTSTATE_RETURN_IF_ERROR(AgreeOn(collective_, taken.status()));
  // The daemon of a skipped step knows the norm of its own gradients alone.
  if (verdict == Verdict::kSkip && is_split()) {
    taken->gradient_norm = norm.gradient_norm;
  }
  return taken;
}

absl::StatusOr<Outcome> SplitAgreement::NoteNorm(Session& session,
                                                 const Outcome& prepared,
                                                 const NodesNorm& norm) {
  absl::StatusOr<Outcome> noted = prepared;
  if (prepared.prepared) {
    StepVerdict verdict = VerdictAbout(prepared, Verdict::kClip);
    verdict.gradient_norm = norm.gradient_norm;
    verdict.clip_coefficient = norm.clip_coefficient;
    noted = session.Decide(verdict);
    // To daemons of version 0.35 this verdict said more.
    if (noted.ok() && !noted->prepared) {
      noted = absl::UnimplementedError(absl::StrCat(
          "the daemon of ", places_.node_name(),
          " is of an earlier build, which has taken step ", prepared.step,
          " before all nodes had agreed: upgrade optstated on all nodes, and "
          "start all ranks again, which settles the step"));
    }
  }
  const uint64_t is_noted = noted.ok() ? 1 : 0;
  const absl::StatusOr<std::vector<uint64_t>> all =
      GatherNumbers(collective_, absl::MakeConstSpan(&is_noted, 1));
  if (!noted.ok()) return noted;
  if (!all.ok()) return UndecidedError(noted, all.status());
  const auto lacking = std::find(all->begin(), all->end(), uint64_t{0});
  if (lacking == all->end()) return noted;
  return UndecidedError(
      noted, absl::UnavailableError(
                 absl::StrCat("the daemon of rank ", lacking - all->begin(),
                              " has not noted the norm of all gradients")));
}

absl::Status SplitAgreement::Drop(Session& session,
                                  const absl::StatusOr<Outcome>& prepared,
                                  const Votes& votes) {
  absl::Status mine = prepared.status();
  bool is_dropped = true;
  if (prepared.ok() && prepared->prepared) {
    mine = session.Decide(VerdictAbout(*prepared, Verdict::kAbort)).status();
    is_dropped = mine.ok();
  }
  if (is_split()) {
    // Every rank has brought what it can.
    OPTSTATE_RETURN_IF_ERROR(collective_.Barrier());
    if (!prepared.ok()) {
      is_dropped = session.Abort(session.committed_step() + 1).ok();
    }
    const uint64_t number = is_dropped ? 1 : 0;
    OPTSTATE_ASSIGN_OR_RETURN(
        const std::vector<uint64_t> all,
        GatherNumbers(collective_, absl::MakeConstSpan(&number, 1)));
    const bool is_dropped_everywhere = std::all_of(
        all.begin(), all.end(), [](uint64_t each) { return each != 0; });
    if (is_dropped_everywhere) undecided_ = 0;
  }
  OPTSTATE_RETURN_IF_ERROR(AgreeOn(collective_, mine));
  return DifferenceError(places_, votes);
}

}  // namespace optstate::client
