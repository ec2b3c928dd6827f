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
  if (!job_.recovery.has_value()) {
    gradients_.DropGradientsOfAbsent();
    stager_.RestoreStaged();
    gradients_.RemoveStaleStagingFiles();
  }
  return absl::OkStatus();
}

absl::Status JobRecovery::PrepareRecovery(uint64_t step) {
  storage::StepIntent intent;
  OPTSTATE_RETURN_IF_ERROR(storage::ReadStepIntent(
      job_.tier->recovery().step_intent, step, job_.layout().groups().size(),
      job_.parameter_count(), &intent));
  RecoveredStep& recovery = job_.recovery.emplace();
  recovery.record = intent.header.record;
  recovery.gradient_limit = intent.header.gradient_limit;
  recovery.groups.assign(intent.groups.begin(), intent.groups.end());
  recovery.updated.assign(intent.updated.begin(), intent.updated.end());
  recovery.pushed_by.assign(intent.pushed_by.begin(), intent.pushed_by.end());
  return absl::OkStatus();
}

void JobRecovery::FinishStepIfPossible() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (gradients_.LacksGradients(rank)) return;
  }
  const absl::Status applied =
      committer_.ApplyStep(gradients_.RecoveryUpdate(), job_.recovery->record);
  EndRecovery();
  sums_.AnswerCommits(applied, job_.LastOutcome());
  step_.open_step.DropAll();
  step_.progress.End();
  step_.timer.Drop();
  // The next engine goes on with a step that failed, and needs its gradients.
  if (!applied.ok()) return;
  ++job_.tier->control()->steps_recovered;
  spdlog::info("step finished after a crash: job={} step={}", job_.options.name,
               job_.record().committed_step);
  gradients_.DropGradientsOfAbsent();
  // Removes the staging files of ranks that were lost meanwhile.
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
  if (!gradients_.LacksGradients(spec.rank)) return job_.StillRecovering();
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
  job_.recovery.reset();
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
      job_.HowToGoOn()));
}

absl::Status JobRecovery::LostGradientsError(uint64_t rank) const {
  return LostInsideError(
      absl::StrCat("and the gradients of rank ", rank,
                   " that it needs ended with the rank's session"));
}

absl::Status JobRecovery::MixedStepsError(absl::string_view why) const {
  return absl::DataLossError(absl::StrCat(
      "job \"", job_.options.name, "\": its files are not of one step: ", why,
      ". ", job_.HowToGoOn()));
}

}  // namespace optstate::session
