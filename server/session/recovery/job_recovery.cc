#include "server/session/recovery/job_recovery.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "spdlog/spdlog.h"
#include "storage/persist_in_order.h"

namespace optstate::session {

// Adopts the step in which an engine died. A recorded step only lacked the
// clearing of its mark. An unrecorded one has runs of the former step, runs of
// this one, and one run per worker in between.
absl::Status JobRecovery::AdoptStep() {
  storage::ControlFile& control = *job_.tier->control();
  std::atomic<uint64_t>& mark = control.step_in_progress;
  if (mark.load(std::memory_order_acquire) == job_.record().committed_step) {
    mark.store(0, std::memory_order_release);
  }
  // A load of all of a failed job had begun, which gives its step up: the next
  // one clears what there is of the state.
  if (mark.load(std::memory_order_acquire) != 0 &&
      job_.record().load_touched_from == 0) {
    OPTSTATE_RETURN_IF_ERROR(job_.scheduler->ForgetStep(/*is_whole=*/true));
    mark.store(0, std::memory_order_release);
  }
  const uint64_t step = mark.load(std::memory_order_acquire);
  // No step was decided: all speculative writes are rolled back.
  if (step == 0) {
    OPTSTATE_RETURN_IF_ERROR(speculator_.RollBackSpeculation());
    control.step_given_up.store(0, std::memory_order_release);
  }
  const absl::Status stamps = job_.scheduler->CheckStamps(
      step != 0 ? step : job_.record().committed_step);
  if (!stamps.ok()) return MixedStepsError(stamps.message());
  const absl::StatusOr<uint64_t> rolled_back = job_.scheduler->RollBack(step);
  if (!rolled_back.ok()) return LostInsideError(rolled_back.status().message());
  const bool is_given_up = step != 0 && control.step_given_up.load() == step;
  // For a step that was given up, these runs were counted before.
  if (!is_given_up) control.runs_rolled_back += *rolled_back;
  const absl::Status loaded = applier_.AdoptLoadedMasters();
  if (!loaded.ok()) {
    return Annotate(loaded, absl::StrCat("job \"", job_.options.name, "\""));
  }
  if (is_given_up) {
    gradients_.DropGradientsOfAbsent();
    return LostGradientsError(control.given_up_for_rank);
  }
  if (step != 0) {
    const absl::Status prepared = PrepareRecovery(step);
    if (!prepared.ok()) return LostInsideError(prepared.message());
    spdlog::warn("engine died in a step: job={} step={} runs_rolled_back={}",
                 job_.options.name, step, *rolled_back);
    gradients_.FindGradients();
    FinishStepIfPossible();
    OPTSTATE_RETURN_IF_ERROR(job_.failure);
    absl::Status awaited = CheckGradientsMayCome();
    if (!awaited.ok()) {
      spdlog::error("{}", awaited.ToString());
      EndRecovery();
      return awaited;
    }
  }
  const uint64_t prepared = control.step_prepared.load();
  if (step == 0 && prepared == job_.record().committed_step + 1) {
    AdoptPrepared(prepared);
  }
  if (!job_.recovery.has_value()) {
    gradients_.DropGradientsOfAbsent();
    stager_.RestoreStaged();
    gradients_.RemoveStaleStagingFiles();
  }
  return absl::OkStatus();
}

// A prepared step whose gradients are lost, or whose intent is, is as if it
// never had been: none of its tiles is touched.
void JobRecovery::AdoptPrepared(uint64_t step) {
  const absl::Status prepared = PrepareRecovery(step);
  if (!prepared.ok()) {
    spdlog::error("prepared step dropped: job={} step={} error=\"{}\"",
                  job_.options.name, step, prepared.ToString());
    return step_.progress.GiveUpPrepared();
  }
  job_.recovery->awaits_verdict = true;
  gradients_.FindGradients();
  const absl::Status awaited = CheckGradientsMayCome();
  if (awaited.ok()) {
    spdlog::info("step is prepared and waits for its verdict: job={} step={}",
                 job_.options.name, step);
    return;
  }
  spdlog::error("prepared step dropped, its gradients are lost: job={} step={}",
                job_.options.name, step);
  DropPrepared();
}

void JobRecovery::KeepPrepared(
    const storage::StepRecord& record,
    absl::Span<const storage::StepIntentGroup> groups, double gradient_limit,
    absl::Span<const uint8_t> updated, absl::Span<const uint64_t> pushed_by) {
  RecoveredStep& prepared = job_.recovery.emplace(std::move(spare_));
  prepared.awaits_verdict = true;
  prepared.is_ours = true;
  prepared.TakeRecord(record);
  prepared.gradient_limit = gradient_limit;
  prepared.groups.assign(groups.begin(), groups.end());
  prepared.updated.assign(updated.begin(), updated.end());
  prepared.pushed_by.assign(pushed_by.begin(), pushed_by.end());
}

void JobRecovery::DropPrepared() {
  step_.progress.GiveUpPrepared();
  EndRecovery();
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    stager_.DropStaged(rank);
  }
  step_.timer.Drop();
  RemoveGradientsOfAbsent();
}

absl::Status JobRecovery::PrepareRecovery(uint64_t step) {
  storage::StepIntent intent;
  OPTSTATE_RETURN_IF_ERROR(storage::ReadStepIntent(
      job_.tier->recovery().step_intent, step, job_.layout().groups().size(),
      job_.parameter_count(), &intent));
  RecoveredStep& recovery = job_.recovery.emplace();
  recovery.TakeRecord(intent.header.record);
  recovery.gradient_limit = intent.header.gradient_limit;
  recovery.groups.assign(intent.groups.begin(), intent.groups.end());
  recovery.updated.assign(intent.updated.begin(), intent.updated.end());
  recovery.pushed_by.assign(intent.pushed_by.begin(), intent.pushed_by.end());
  const storage::ControlFile& control = *job_.tier->control();
  if (control.step_clipped.load() == step) {
    recovery.Clip(control.nodes_gradient_norm, control.nodes_clip_coefficient);
  }
  return absl::OkStatus();
}

void JobRecovery::FinishStepIfPossible() {
  if (job_.recovery->awaits_verdict) return;
  const bool is_applied =
      (job_.recovery->record.flags & storage::kStepRecordApplied) != 0;
  for (uint32_t rank = 0; is_applied && rank < ranks_.size(); ++rank) {
    if (gradients_.LacksGradients(rank)) return;
  }
  const bool is_ours = job_.recovery->is_ours;
  const absl::Status taken =
      is_applied ? committer_.ApplyStep(gradients_.RecoveryUpdate(),
                                        job_.recovery->record)
                 : committer_.SkipStep(job_.recovery->record);
  const uint64_t update_bytes =
      is_ours && is_applied
          ? job_.scheduler->UpdateBytes(job_.recovery->updated)
          : 0;
  EndRecovery();
  sums_.AnswerCommits(taken, job_.LastOutcome());
  step_.open_step.DropAll();
  step_.progress.End();
  // The next engine goes on with a step that failed, and needs its gradients.
  if (!taken.ok() || !is_ours) step_.timer.Drop();
  if (!taken.ok()) return;
  if (is_ours) {
    step_.timer.Finish(update_bytes);
  } else {
    ++job_.tier->control()->steps_recovered;
    spdlog::info("step finished after a crash: job={} step={}",
                 job_.options.name, job_.record().committed_step);
  }
  if (!is_ours || ranks_.AttachedCount() != ranks_.size()) {
    RemoveGradientsOfAbsent();
  }
}

// Removes what was kept for ranks that were lost meanwhile.
void JobRecovery::RemoveGradientsOfAbsent() {
  gradients_.DropGradientsOfAbsent();
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_.state(rank) != RankState::kAbsent) continue;
    ::unlink(
        job_.StagingPath(rank, job_.rank_mark(rank).client_instance).c_str());
  }
}

// Refuses another process in the rank's place: it has other gradients, or none.
// The rank itself is refused with memory that lacks what it had pushed.
absl::Status JobRecovery::AdmitToRecovery(const AttachSpec& spec) {
  if (ranks_.WasAttachedLast(spec)) {
    const uint64_t needed = gradients_.RecoveryGradientBytes(spec.rank);
    if (!gradients_.LacksGradients(spec.rank) ||
        spec.gradient_bytes_present >= needed) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", spec.rank, " of job \"", job_.options.name, "\" has pushed ",
        needed, " bytes of step ", job_.recovery->record.committed_step,
        ", and its gradient area has pages for ", spec.gradient_bytes_present));
  }
  if (job_.recovery->awaits_verdict || !gradients_.LacksGradients(spec.rank)) {
    return job_.StillRecovering();
  }
  FailRecovery(spec.rank);
  return job_.failure;
}

// Returns an error when gradients of a lost rank are missing. They may be kept,
// and only be out of reach of this engine: the next one looks again.
absl::Status JobRecovery::CheckGradientsMayCome() const {
  if (!job_.recovery.has_value()) return absl::OkStatus();
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (gradients_.LacksGradients(rank) &&
        ranks_.state(rank) != RankState::kAwaited) {
      return LostGradientsError(rank);
    }
  }
  return absl::OkStatus();
}

void JobRecovery::FailRecovery(uint32_t rank) {
  if (job_.recovery->awaits_verdict) {
    spdlog::error(
        "prepared step dropped, the gradients of a rank are lost: job={} "
        "step={} rank={}",
        job_.options.name, job_.recovery->record.committed_step, rank);
    return DropPrepared();
  }
  storage::ControlFile& control = *job_.tier->control();
  control.given_up_for_rank = rank;
  storage::PersistInOrder(storage::PersistPoint::kStepGivenUp);
  control.step_given_up.store(job_.recovery->record.committed_step,
                              std::memory_order_release);
  job_.failure = LostGradientsError(rank);
  spdlog::error("{}", job_.failure.ToString());
  const StepOutcome none;
  sums_.AnswerCommits(job_.failure, none);
  step_.open_step.DropAll();
  step_.timer.Drop();
  EndRecovery();
  gradients_.DropGradientsOfAbsent();
}

// Ends the recovery and its mappings: from now on gradients are in the areas of
// the attached ranks.
void JobRecovery::EndRecovery() {
  spare_ = *std::exchange(job_.recovery, std::nullopt);
  spare_.kept.clear();
  spare_.staged.clear();
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_.gradient_area(rank) = ranks_.state(rank) == RankState::kAttached
                                     ? ranks_.session(rank).spec.gradient_area
                                     : nullptr;
  }
}

absl::Status JobRecovery::LostInsideError(absl::string_view why) const {
  const uint64_t step = job_.tier->control()->step_in_progress.load();
  return absl::DataLossError(absl::StrCat(
      "job \"", job_.options.name, "\": the engine died inside step ", step,
      ", ", why,
      ", so its state is partly of that step and partly of the one before. ",
      job_.DescribeWayOn()));
}

absl::Status JobRecovery::LostGradientsError(uint64_t rank) const {
  return LostInsideError(
      absl::StrCat("and the gradients of rank ", rank,
                   " that it needs ended with the rank's session"));
}

absl::Status JobRecovery::MixedStepsError(absl::string_view why) const {
  return absl::DataLossError(absl::StrCat(
      "job \"", job_.options.name, "\": its files are not of one step: ", why,
      ". ", job_.DescribeWayOn()));
}

}  // namespace optstate::session
