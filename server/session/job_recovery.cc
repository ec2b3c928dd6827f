// Finishes a step in which the previous engine died.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/types/status_macros.h"
#include "server/session/job_impl.h"
#include "server/session/staging_file.h"
#include "spdlog/spdlog.h"

namespace optstate {

absl::Status JobImpl::LostInside(absl::string_view why) const {
  const uint64_t step = tier_->control()->step_in_progress.load();
  return absl::DataLossError(absl::StrCat(
      "job \"", options_.name, "\": the engine died inside step ", step, ", ",
      why,
      ", so its state is partly of that step and partly of the one before. ",
      HowToGoOn()));
}

std::string JobImpl::HowToGoOn() const {
  return absl::StrCat("Last good step: ", record().committed_step,
                      ". Delete the job (optctl delete job ", options_.name,
                      ") and start it again from a checkpoint");
}

absl::Status JobImpl::LostGradientsOf(uint64_t rank) const {
  return LostInside(
      absl::StrCat("and the gradients of rank ", rank,
                   " that it needs ended with the rank's session"));
}

absl::Status JobImpl::NotOfOneStep(absl::string_view why) const {
  return absl::DataLossError(absl::StrCat(
      "job \"", options_.name, "\": its files are not of one step: ", why, ". ",
      HowToGoOn()));
}

absl::Status JobImpl::CheckStepFile(absl::string_view file, uint64_t bytes,
                                    uint64_t needed) const {
  if (bytes >= needed) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      options_.directory, "/state/", file,
      bytes == 0 ? " is missing or empty"
                 : absl::StrCat(" has ", bytes, " bytes"),
      ", it must have ", needed,
      ": without it what an engine left half written in step ",
      record().committed_step + 1, " cannot be put right. ", HowToGoOn()));
}

// Checks the step files before any is enlarged or made anew, for its zeros
// would say that nothing was half written. Between two steps they hold nothing
// relevant, except sums that were being added to.
absl::Status JobImpl::CheckStepFiles(const JobDescription& description) const {
  const ControlFile& control = *tier_->control();
  const uint64_t next = record().committed_step + 1;
  const bool in_step = control.step_in_progress.load() == next;
  bool in_sum = false;
  for (uint32_t rank = 0; rank < kWorldSizeMax; ++rank) {
    in_sum |= description.accumulate && rank_mark(rank).step == next;
  }
  if (in_step || in_sum) {
    // Whole slots, at least one, even where no number was recorded.
    const uint64_t slot = StepScheduler::WorkerUndoBytes(1);
    const uint64_t bytes = tier_->undo().size();
    const uint64_t slots = std::max<uint64_t>(1, (bytes + slot - 1) / slot);
    OPTSTATE_RETURN_IF_ERROR(CheckStepFile(
        "undo", bytes, std::max(control.undo_bytes, slots * slot)));
  }
  if (in_step) {
    OPTSTATE_RETURN_IF_ERROR(CheckStepFile(
        "redo", tier_->redo().size(),
        StepScheduler::RedoBytesInUse(description.layout, tier_->undo())));
  }
  if (control.step_speculated.load() != next) return absl::OkStatus();
  if (!StepScheduler::CanSpeculate(description.layout)) {
    return absl::DataLossError(absl::StrCat(
        options_.directory, "/state/control: step_speculated is ", next,
        ", but the job's optimizer is never speculated with. ", HowToGoOn()));
  }
  return CheckStepFile("speculation", tier_->speculation().size(),
                       StepScheduler::SpeculationBytes(description.layout));
}

absl::Status JobImpl::BeingFinished() const {
  return absl::UnavailableError(absl::StrCat(
      "job \"", options_.name, "\" died in step ",
      recovery_->record.committed_step,
      " and is finishing it; it waits for ranks that have its gradients"));
}

// Adopts the step in which an engine died. A recorded step only lacked the
// clearing of its mark. An unrecorded one has runs of the former step, runs of
// this one, and one run per worker in between.
absl::Status JobImpl::AdoptStep() {
  ControlFile& control = *tier_->control();
  std::atomic<uint64_t>& mark = control.step_in_progress;
  if (mark.load(std::memory_order_acquire) == record().committed_step) {
    mark.store(0, std::memory_order_release);
  }
  const uint64_t step = mark.load(std::memory_order_acquire);
  // No step was decided: all speculative writes are rolled back.
  if (step == 0) {
    OPTSTATE_RETURN_IF_ERROR(TakeBackSpeculation());
    control.step_given_up.store(0, std::memory_order_release);
  }
  const absl::Status stamps =
      scheduler_->CheckStamps(step != 0 ? step : record().committed_step);
  if (!stamps.ok()) return NotOfOneStep(stamps.message());
  const absl::StatusOr<uint64_t> taken_back = scheduler_->RollBack(step);
  if (!taken_back.ok()) return LostInside(taken_back.status().message());
  const bool is_given_up = step != 0 && control.step_given_up.load() == step;
  // For a step that was given up, these runs were counted before.
  if (!is_given_up) control.runs_rolled_back += *taken_back;
  const absl::Status loaded = AdoptLoadedMasters();
  if (!loaded.ok()) {
    return Annotate(loaded, absl::StrCat("job \"", options_.name, "\""));
  }
  if (is_given_up) {
    DropGradientsOfAway();
    return LostGradientsOf(control.given_up_for_rank);
  }
  if (step != 0) {
    const absl::Status prepared = PrepareRecovery(step);
    if (!prepared.ok()) return LostInside(prepared.message());
    spdlog::warn("engine died in a step: job={} step={} runs_rolled_back={}",
                 options_.name, step, *taken_back);
    FindGradients();
    TryToFinishStep();
    absl::Status awaited = CheckGradientsMayCome();
    if (!awaited.ok()) {
      spdlog::error("{}", awaited.ToString());
      EndRecovery();
      return awaited;
    }
  }
  if (!recovery_.has_value()) {
    DropGradientsOfAway();
    RestoreStaged();
    RemoveStaleStagingFiles();
  }
  return absl::OkStatus();
}

absl::Status JobImpl::PrepareRecovery(uint64_t step) {
  StepIntent intent;
  OPTSTATE_RETURN_IF_ERROR(ReadStepIntent(tier_->recovery().step_intent, step,
                                          layout_of_job().groups().size(),
                                          parameter_count(), &intent));
  Recovery& recovery = recovery_.emplace();
  recovery.record = intent.header.record;
  recovery.gradient_limit = intent.header.gradient_limit;
  recovery.groups.assign(intent.groups.begin(), intent.groups.end());
  recovery.updated.assign(intent.updated.begin(), intent.updated.end());
  recovery.pushed_by.assign(intent.pushed_by.begin(), intent.pushed_by.end());
  return absl::OkStatus();
}

// Finds the gradients of ranks that are not attached: segments kept by the
// supervisor, and staging files. Only those written by the session that
// committed the step are used.
void JobImpl::FindGradients() {
  for (KeptGradients& kept : options_.kept) {
    if (kept.rank >= ranks_.size() || kept.client_instance == 0 ||
        kept.client_instance != rank_mark(kept.rank).client_instance) {
      continue;
    }
    const uint32_t rank = kept.rank;
    const absl::Status mapped = MapGradients(std::move(kept));
    if (!mapped.ok()) {
      spdlog::warn("kept gradients refused: job={} rank={} error=\"{}\"",
                   options_.name, rank, mapped.ToString());
    }
  }
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (gradient_areas_[rank] != nullptr) continue;
    const uint64_t instance = rank_mark(rank).client_instance;
    const uint64_t bytes = shape_->partitions[rank].gradient_area_bytes;
    auto file = OpenStagingFile(StagingPath(rank, instance), bytes);
    if (!file.ok()) continue;  // a rank with shared memory has none
    recovery_->staged.push_back(*std::move(file));
    gradient_areas_[rank] = recovery_->staged.back().data();
  }
}

absl::Status JobImpl::MapGradients(KeptGradients kept) {
  const uint32_t rank = kept.rank;
  const uint64_t offset_bytes = kept.gradient_offset_bytes;
  OPTSTATE_ASSIGN_OR_RETURN(
      shm::PeerSegment segment,
      MapKeptGradients(std::move(kept),
                       shape_->partitions[rank].gradient_area_bytes,
                       GradientBytesOfRecovery(rank)));
  recovery_->kept.push_back(std::move(segment));
  gradient_areas_[rank] = recovery_->kept.back().data() + offset_bytes;
  return absl::OkStatus();
}

// Takes the gradients of a rank that attaches. The recovery may have found the
// same ones already. Otherwise they are mapped anew, so that they outlive the
// session.
void JobImpl::TakeGradients(const AttachSpec& spec) {
  const std::byte*& area = gradient_areas_[spec.rank];
  if (recovery_.has_value() && (area != nullptr || !spec.gradients_present)) {
    return;
  }
  area = spec.gradient_area;
  if (!recovery_.has_value() || spec.gradient_segment < 0) return;
  const absl::Status mapped =
      MapGradients({.rank = spec.rank,
                    .client_instance = spec.client_instance,
                    .gradient_offset_bytes = spec.gradient_offset_bytes,
                    .segment = UniqueFd(
                        ::fcntl(spec.gradient_segment, F_DUPFD_CLOEXEC, 0))});
  if (!mapped.ok()) {
    spdlog::warn(
        "gradients end with their session: job={} rank={} error=\"{}\"",
        options_.name, spec.rank, mapped.ToString());
  }
}

StepScheduler::Update JobImpl::UpdateOfRecovery() const {
  StepScheduler::Update update;
  update.step = recovery_->record.committed_step;
  update.groups = recovery_->groups;
  update.gradient_limit = recovery_->gradient_limit;
  update.updated = recovery_->updated;
  update.pushed_by = recovery_->pushed_by;
  update.gradient_areas = gradient_areas_;
  return update;
}

bool JobImpl::LacksGradients(uint32_t rank) const {
  return gradient_areas_[rank] == nullptr &&
         scheduler_->NeedsGradients(rank, UpdateOfRecovery());
}

// Returns how much of the rank's gradient area, from its begin, has gradients
// of the step. The rank had pushed them, so their pages were there.
uint64_t JobImpl::GradientBytesOfRecovery(uint32_t rank) const {
  const StepScheduler::Update update = UpdateOfRecovery();
  uint64_t bytes = 0;
  for (const Piece& piece : shape_->partitions[rank].pieces) {
    if (update.updated[piece.parameter] == 0 ||
        !update.HasPushed(rank, piece.parameter)) {
      continue;
    }
    const DType dtype =
        layout_of_job().parameters()[piece.parameter].gradient_dtype;
    bytes = std::max(
        bytes, piece.gradient_offset_bytes + piece.numel * SizeInBytes(dtype));
  }
  return bytes;
}

void JobImpl::TryToFinishStep() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (LacksGradients(rank)) return;
  }
  const absl::Status applied = ApplyStep(UpdateOfRecovery(), recovery_->record);
  if (applied.ok()) {
    ++tier_->control()->steps_recovered;
    spdlog::info("step finished after a crash: job={} step={}", options_.name,
                 record().committed_step);
    EndRecovery();
    DropGradientsOfAway();
  }
  AnswerCommits(applied, LastOutcome());
  open_step_.DropAll();
  timer_.Drop();
  // Removes the staging files of ranks that were lost meanwhile.
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].attached || IsAwaited(rank)) continue;
    ::unlink(StagingPath(rank, rank_mark(rank).client_instance).c_str());
  }
}

// Restores what ranks had staged, before the first rank is attached.
void JobImpl::RestoreStaged() {
  if (!shape_->description.accumulate) return;
  if (accumulates_together()) return RestoreSums();
  std::vector<uint32_t> epochs(ranks_.size(), 0);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankMark& mark = rank_mark(rank);
    if (mark.step != record().committed_step + 1) continue;
    epochs[rank] = mark.epoch;
    const auto& pieces = shape_->partitions[rank].pieces;
    for (size_t i = 0; i < pieces.size(); ++i) {
      const int64_t staged = scheduler_->StagedMicroStep(pieces[i], mark.epoch);
      if (staged < 0) continue;
      open_step_.NoteStaged(rank, i, static_cast<uint32_t>(staged));
    }
  }
  scheduler_->RestoreSums(epochs);
}

absl::Status JobImpl::FailInside(absl::string_view what,
                                 const absl::Status& why) {
  failure_ = Annotate(
      why,
      absl::StrCat("job \"", options_.name, "\" cannot finish ", what,
                   ". When the cause is mended, optctl recover ", options_.name,
                   " goes on with it; else load the job "
                   "anew. The cause"));
  spdlog::error("{}", failure_.ToString());
  return failure_;
}

std::string JobImpl::StagingPath(uint32_t rank,
                                 uint64_t client_instance) const {
  return StagingFilePath(options_.directory, rank, client_instance);
}

// Removes stale staging files. Files of ranks that are to return are kept, for
// on a full file system they could not be made anew; another session in a
// rank's place removes the rank's file.
void JobImpl::RemoveStaleStagingFiles() const {
  std::set<std::string> kept;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].attached && !IsAwaited(rank)) continue;
    kept.insert(StagingPath(rank, rank_mark(rank).client_instance));
  }
  std::error_code error;
  for (std::filesystem::directory_iterator entry(options_.directory, error),
       end;
       !error && entry != end; entry.increment(error)) {
    if (IsStagingFile(entry->path().filename().string()) &&
        !kept.contains(entry->path().string())) {
      ::unlink(entry->path().c_str());
    }
  }
}

bool JobImpl::WasAttachedLast(const AttachSpec& spec) const {
  return spec.client_instance != 0 &&
         spec.client_instance == rank_mark(spec.rank).client_instance;
}

// Refuses another process in the rank's place: it has other gradients, or none.
// The rank itself is refused with memory that lacks what it had pushed.
absl::Status JobImpl::AdmitToRecovery(const AttachSpec& spec) {
  if (WasAttachedLast(spec)) {
    const uint64_t needed = GradientBytesOfRecovery(spec.rank);
    if (!LacksGradients(spec.rank) || spec.gradient_bytes_present >= needed) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", spec.rank, " of job \"", options_.name, "\" has pushed ",
        needed, " bytes of step ", recovery_->record.committed_step,
        ", and its gradient area has pages for ", spec.gradient_bytes_present));
  }
  if (!LacksGradients(spec.rank)) return BeingFinished();
  FailRecovery(spec.rank);
  return failure_;
}

// Returns an error when gradients of a lost rank are missing. They may be kept,
// and only be out of reach of this engine: the next one looks again.
absl::Status JobImpl::CheckGradientsMayCome() const {
  if (!recovery_.has_value()) return absl::OkStatus();
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (LacksGradients(rank) && !IsAwaited(rank)) return LostGradientsOf(rank);
  }
  return absl::OkStatus();
}

void JobImpl::FailRecovery(uint32_t rank) {
  ControlFile& control = *tier_->control();
  control.given_up_for_rank = rank;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  control.step_given_up.store(recovery_->record.committed_step,
                              std::memory_order_release);
  failure_ = LostGradientsOf(rank);
  spdlog::error("{}", failure_.ToString());
  const StepOutcome none;
  AnswerCommits(failure_, none);
  open_step_.DropAll();
  timer_.Drop();
  EndRecovery();
  DropGradientsOfAway();
}

// Drops the kept gradients of ranks that are away. They are not needed between
// two steps, nor for a step that is given up: ranks that return bring theirs
// again.
void JobImpl::DropGradientsOfAway() {
  if (options_.keeper == nullptr) return;
  for (uint32_t rank = 0; rank < kWorldSizeMax; ++rank) {
    const bool is_attached = rank < ranks_.size() && ranks_[rank].attached;
    if (!is_attached) options_.keeper->Drop(rank);
  }
}

// Ends the recovery and its mappings: from now on gradients are in the areas of
// the attached ranks.
void JobImpl::EndRecovery() {
  recovery_.reset();
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankSession& session = ranks_[rank];
    gradient_areas_[rank] =
        session.attached ? session.spec.gradient_area : nullptr;
  }
}

// Takes the rank's new instance: a session that returns finds what it had
// staged, another one nothing.
void JobImpl::TakeInstance(const AttachSpec& spec) {
  if (WasAttachedLast(spec)) return;
  RankMark& mark = rank_mark(spec.rank);
  mark.attached = 0;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  DropStaged(spec.rank);
  ::unlink(StagingPath(spec.rank, mark.client_instance).c_str());
  std::atomic_signal_fence(std::memory_order_seq_cst);
  mark.client_instance = spec.client_instance;
}

}  // namespace optstate
