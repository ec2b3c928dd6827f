#include "server/session/ranks/rank_attachments.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/os/process_stat.h"
#include "server/session/ranks/attach_rules.h"
#include "storage/persist_in_order.h"

namespace optstate::session {

absl::Status RankAttachments::CheckMayAttach(const AttachSpec& spec) const {
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job_.failure);
  AttachFacts facts;
  facts.job = job_.options.name;
  facts.world_size = ranks_.size();
  facts.layout_hash = job_.layout().hash();
  facts.shape = job_.shape_number;
  facts.draining = gate_.draining();
  if (spec.rank < ranks_.size()) {
    const RankSession& session = ranks_.session(spec.rank);
    facts.was_attached_last = ranks_.WasAttachedLast(spec);
    if (ranks_.state(spec.rank) == RankState::kAttached)
      facts.attached_pid = session.spec.pid;
    facts.gradient_bytes =
        job_.shape->partitions[spec.rank].gradient_area_bytes;
  }
  return CheckAttach(spec, facts, [&] {
    return ranks_.IsHeld(spec.rank, spec.process) ? ranks_.HeldError(spec.rank)
                                                  : absl::OkStatus();
  });
}

absl::StatusOr<AttachResult> RankAttachments::Attach(const AttachSpec& spec) {
  OPTSTATE_RETURN_IF_ERROR(CheckMayAttach(spec));
  if (job_.recovery.has_value()) {
    OPTSTATE_RETURN_IF_ERROR(recovery_.AdmitToRecovery(spec));
  } else {
    ReplaceInstance(spec);
  }
  ranks_.Attach(spec);
  gradients_.AdoptGradients(spec);
  ranks_.NoteHadSession();
  if (job_.options.keeper != nullptr && spec.gradient_segment >= 0) {
    job_.options.keeper->Keep(spec.rank, spec.client_instance,
                              spec.gradient_offset_bytes,
                              spec.gradient_segment);
  }
  if (job_.recovery.has_value()) {
    ranks_.session(spec.rank).recovering_step =
        job_.recovery->record.committed_step;
    recovery_.FinishStepIfPossible();
  }
  AttachResult result;
  result.committed_step = job_.record().committed_step;
  result.phase = job_.phase();
  result.has_last_outcome =
      (job_.record().flags & storage::kStepRecordHasOutcome) != 0;
  if (result.has_last_outcome) result.last_outcome = job_.LastOutcome();
  result.loss_scale = job_.record().loss_scale;
  result.good_steps = job_.record().good_steps;
  result.hysteresis_left = job_.record().hysteresis_left;
  result.loads_finished = job_.record().loads_finished;
  result.load_required_from = job_.record().load_required_from;
  result.speculates = job_.speculates();
  if (job_.shape->description.accumulate) {
    result.staged = stager_.StagedRanges(spec.rank);
  }
  return result;
}

// Takes the rank's new instance: a session that returns finds what it had
// staged, another one nothing.
void RankAttachments::ReplaceInstance(const AttachSpec& spec) {
  if (ranks_.WasAttachedLast(spec)) return;
  if (ranks_.state(spec.rank) == RankState::kAwaited) ranks_.Leave(spec.rank);
  storage::RankMark& mark = job_.rank_mark(spec.rank);
  storage::PersistInOrder(storage::PersistPoint::kInstanceDrop);
  stager_.DropStaged(spec.rank);
  ::unlink(job_.StagingPath(spec.rank, mark.client_instance).c_str());
  storage::PersistInOrder(storage::PersistPoint::kClientInstance);
  mark.client_instance = spec.client_instance;
}

// Ends a rank's session. While a step is being finished the rank may return
// with its gradients, and is awaited as before it attached: if its process
// lives, or, when the process cannot be watched, if the step needs gradients
// that only its session has.
void RankAttachments::DetachLocked(uint32_t rank, bool for_good) {
  if (!ranks_.CheckAttached(rank).ok()) return;
  const RankSession& session = ranks_.session(rank);
  const RankProcess process = session.spec.process;
  const std::byte* const area = session.spec.gradient_area;
  if (job_.recovery.has_value() && job_.recovery->awaits_verdict) {
    gradients_.KeepGradients(rank);
  }
  const auto is_needed = [&]() {
    return (ranks_.gradient_area(rank) == nullptr ||
            ranks_.gradient_area(rank) == area) &&
           job_.scheduler->NeedsGradients(rank, gradients_.RecoveryUpdate());
  };
  const bool comes_back =
      job_.recovery.has_value() && !for_good && !session.has_said_farewell &&
      job_.rank_mark(rank).attached != 0 &&
      (process.pid != 0 ? !os::HasEnded(process.pid, process.start_ticks)
                        : is_needed());
  const bool in_step = step_.progress.phase() == StepPhase::kOpen;
  const bool is_needed_by_next = IsNeededByNextEngine(rank);
  ranks_.session(rank).ending.reset();  // no rank to answer
  if (comes_back) {
    step_.open_step.DropRank(rank);
    ranks_.Await(rank);
  } else {
    BeginLoss(rank, in_step);
  }
  rounds_.Leave(rank, "was lost");
  if (job_.executor != nullptr) job_.executor->gradients().Unmap(rank);
  // The next session that attaches gives its own gradient area.
  if (ranks_.gradient_area(rank) == area) ranks_.gradient_area(rank) = nullptr;
  if (job_.options.keeper != nullptr && !is_needed_by_next) {
    job_.options.keeper->Drop(rank);
  }
  if (comes_back) return;
  EndLoss(rank, in_step);
  if (job_.recovery.has_value() && gradients_.LacksGradients(rank))
    recovery_.FailRecovery(rank);
}

void RankAttachments::NoteFarewell(uint32_t rank, uint64_t client_instance) {
  GiveUpAbsent(rank, client_instance);
  if (rank < ranks_.size() && ranks_.state(rank) == RankState::kAttached &&
      client_instance == ranks_.session(rank).spec.client_instance) {
    ranks_.session(rank).has_said_farewell = true;
  }
}

void RankAttachments::GiveUpAbsent(uint32_t rank, uint64_t client_instance) {
  if (rank >= ranks_.size() || ranks_.state(rank) != RankState::kAwaited ||
      client_instance != job_.rank_mark(rank).client_instance) {
    return;
  }
  if (!job_.failure.ok()) {  // all is kept for inspection
    ranks_.Leave(rank);
    return;
  }
  const bool in_step = !job_.recovery.has_value() &&
                       (step_.progress.phase() == StepPhase::kOpen ||
                        ranks_.WasBegun(job_.record().committed_step + 1) ||
                        ranks_.losses().IsUnacknowledged(rank));
  BeginLoss(rank, in_step);
  EndLoss(rank, in_step);
  if (job_.recovery.has_value() && gradients_.LacksGradients(rank))
    recovery_.FailRecovery(rank);
}

// Returns whether the gradients that the rank has pushed are of a former
// engine's step that this one is finishing, or has failed to.
bool RankAttachments::IsNeededByNextEngine(uint32_t rank) const {
  return job_.recovery.has_value() ||
         job_.IsUnfinished(ranks_.session(rank).recovering_step);
}

// Records the loss to be reported before dropping what the rank staged: an
// engine that dies in between leaves the rank attached, and the next one
// repeats this.
void RankAttachments::BeginLoss(uint32_t rank, bool in_step) {
  ranks_.losses().Note(rank,
                       job_.recovery.has_value()
                           ? job_.recovery->record.committed_step
                           : job_.record().committed_step + 1,
                       in_step);
  storage::PersistInOrder(storage::PersistPoint::kLossDrop);
  if (IsNeededByNextEngine(rank)) {
    // The step is finished with its gradients, or not at all.
    step_.open_step.DropRank(rank);
  } else {
    stager_.DropStaged(rank);
    ::unlink(
        job_.StagingPath(rank, job_.rank_mark(rank).client_instance).c_str());
  }
  storage::PersistInOrder(storage::PersistPoint::kRankDetached);
  ranks_.Leave(rank);
}

// Notifies ranks that already wait. When all ranks are gone, no rank waits for
// the lost ones.
void RankAttachments::EndLoss(uint32_t rank, bool in_step) {
  if (ranks_.AttachedCount() + ranks_.AwaitedCount() == 0) {
    for (uint32_t each = 0; each < ranks_.size(); ++each)
      ranks_.losses().Forget(each);
  }
  if (in_step) losses_.NotifyRankLost(rank);
}

}  // namespace optstate::session
