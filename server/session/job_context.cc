#include "server/session/job_context.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/dtype.h"
#include "proto/types/partition.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/passes/gradient_stager.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/workers/available_cores.h"
#include "server/session/durability/job_storage.h"
#include "server/session/job_facts.h"
#include "server/session/recovery/staging_file.h"
#include "spdlog/spdlog.h"

namespace optstate::session {
namespace {

int WorkersOf(const v1::EngineSettings& settings) {
  constexpr int kWorkersMax = 1024;
  return settings.workers() == 0 ? scheduler::AvailableCores()
                                 : static_cast<int>(std::min<uint32_t>(
                                       settings.workers(), kWorkersMax));
}

scheduler::Pinning PinningOf(const v1::EngineSettings& settings) {
  switch (settings.pinning()) {
    case v1::PINNING_NEVER:
      return scheduler::Pinning::kNever;
    case v1::PINNING_ALWAYS:
      return scheduler::Pinning::kAlways;
    default:
      return scheduler::Pinning::kAuto;
  }
}

// The lanes of JobContext::step_spans: the phases, then one for each rank.
observe::LaneName NameStepLane(uint32_t lane) {
  if (lane == 0) return {"steps", "phases"};
  return {"ranks", absl::StrCat("rank ", lane - 1)};
}

// To a client, UNAVAILABLE says that no daemon has answered, and that it may
// ask again: a disk that is gone is another matter.
absl::Status OfJob(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  return absl::FailedPreconditionError(status.message());
}

absl::Status MoveGivenUp(absl::string_view why) {
  return absl::AbortedError(
      absl::StrCat("the records stay where they are: ", why));
}

}  // namespace

JobContext::JobContext(Job::Options job_options)
    : step_spans(&trace, &NameStepLane),
      options(std::move(job_options)),
      placement(
          scheduler::PlaceWorkersHere(WorkersOf(options.config.engine()),
                                      PinningOf(options.config.engine()))),
      pool(WorkersOf(options.config.engine()),
           /*spin=*/WorkersOf(options.config.engine()) <=
               scheduler::AvailableCores(),
           placement, &trace),
      verifier(options.name, options.clock, options.wall_clock),
      devices(options.config.devices(), options.device_runtime) {}

JobContext::~JobContext() { verifier.Cancel("the engine ends"); }

v1::JobPhase JobContext::phase() const {
  if (!failure.ok()) return v1::JOB_PHASE_FAILED;
  if (shape == nullptr) return v1::JOB_PHASE_EMPTY;
  if (recovery.has_value()) return v1::JOB_PHASE_RECOVERING;
  return HasWholeState() ? v1::JOB_PHASE_READY : v1::JOB_PHASE_LOADING;
}

StepOutcome JobContext::LastOutcome() const {
  StepOutcome outcome = OutcomeOf(record());
  if (store != nullptr) outcome.durable_step = store->durable_step();
  return outcome;
}

absl::Span<const int64_t> JobContext::StepCounts() const {
  if (counts_before_pass.empty()) return store->step_counts();
  return counts_before_pass;
}

bool JobContext::IsUnfinished(uint64_t step) const {
  const storage::ControlFile& control = *tier->control();
  return step != 0 && control.step_in_progress.load() == step &&
         control.step_given_up.load() != step;
}

absl::Status JobContext::CheckRegistered() const {
  if (shape != nullptr) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(failure);
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", options.name,
                   "\" has no layout yet: register "
                   "first"));
}

absl::Status JobContext::CheckHasParameterArea() const {
  if (!HoldsParametersOnDisk()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", options.name,
      "\" has its parameters on disk: they are fetched one by one. Attach "
      "through optstate.ParameterStore (C++: client::ParameterStore)"));
}

absl::Status JobContext::CheckParameterRange(uint64_t first,
                                             uint64_t count) const {
  const uint64_t all = parameter_count();
  if (first <= all && count <= all - first) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(count, " parameters from ", first, " of a layout of ", all));
}

absl::Status JobContext::StillRecovering() const {
  if (recovery->awaits_verdict) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", recovery->record.committed_step, " of job \"", options.name,
        "\" is prepared, and what all nodes decided about it is not known "
        "here: "
        "construct the optimizer anew on all ranks of all nodes, with "
        "across_nodes, which brings the decision"));
  }
  return absl::UnavailableError(absl::StrCat(
      "job \"", options.name, "\" died in step ",
      recovery->record.committed_step,
      " and is finishing it; it waits for ranks that have its gradients"));
}

absl::Status JobContext::FailInside(absl::string_view what,
                                    const absl::Status& why) {
  failure = Annotate(
      OfJob(why),
      absl::StrCat("job \"", options.name, "\" cannot finish ", what,
                   ". When the cause is mended, optctl recover ", options.name,
                   " goes on with it; else load the job "
                   "anew. The cause"));
  spdlog::error("{}", failure.ToString());
  return failure;
}

std::string JobContext::DescribeWayOn() const {
  const auto directories = DiskDirectoriesOf(options.config, options.name);
  if (!directories.empty() &&
      ::access((directories[0] + "/commits").c_str(), F_OK) == 0) {
    return absl::StrCat("Last good step: ", record().committed_step,
                        ". Do not delete the job: its last durable step is in ",
                        directories[0], ": optctl recover ", options.name,
                        " --to-durable goes back to it");
  }
  return absl::StrCat("Last good step: ", record().committed_step,
                      ". Delete the job (optctl delete job ", options.name,
                      ") and start it again from a checkpoint");
}

absl::Status JobContext::CheckHasDisk() const {
  OPTSTATE_RETURN_IF_ERROR(CheckRegistered());
  if (HasDisk()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", options.name,
      "\" lies in memory alone: there is nothing on disk to verify"));
}

absl::StatusOr<std::shared_ptr<Verification>> JobContext::BeginVerification() {
  OPTSTATE_RETURN_IF_ERROR(CheckHasDisk());
  return verifier.Begin(store.get());
}

absl::StatusOr<std::shared_ptr<Verification>> JobContext::BeginScrub() {
  OPTSTATE_RETURN_IF_ERROR(CheckHasDisk());
  if (!failure.ok() || recovery.has_value()) {
    return absl::FailedPreconditionError(
        "the job has failed, or finishes the step of a former engine");
  }
  return verifier.BeginScrub(store.get(),
                             options.config.nvme().scrub_bytes_per_s());
}

void JobContext::CancelMove(absl::string_view why) const {
  if (record_move != nullptr) record_move->Cancel(MoveGivenUp(why));
}

void JobContext::EndMove(absl::string_view why) const {
  if (record_move != nullptr) record_move->End(MoveGivenUp(why));
}

void JobContext::DropStore() {
  EndMove("the job's store is made anew");
  verifier.Cancel("the job's store is made anew");
  store.reset();
}

absl::Status JobContext::MakePass(absl::FunctionRef<absl::Status()> pass) {
  return lock.MakePass(pass);
}

absl::Status JobContext::AccessRecords(
    absl::FunctionRef<absl::Status()> access) {
  return OfJob(store->is_resident() ? access() : MakePass(access));
}

absl::Status JobContext::MakeCountingPass(
    absl::FunctionRef<absl::Status()> pass) {
  const auto counts = store->step_counts();
  counts_before_pass.assign(counts.begin(), counts.end());
  absl::Status made = lock.MakePass(pass);
  counts_before_pass.clear();
  return made;
}

void JobContext::Stage(const scheduler::StepScheduler::Staging& staging) {
  const auto& pieces = shape->partitions[staging.rank].pieces;
  uint64_t elements = 0;
  for (size_t i = 0; i < staging.actions.size(); ++i) {
    if (staging.actions[i] == scheduler::StageAction::kNothing) continue;
    elements += pieces[staging.first_piece + i].numel;
  }
  if (is_replicated()) elements *= staging.gradient_areas.size();
  // Another rank's push rather spins on the lock than is woken after a pass.
  constexpr uint64_t kShortElements = uint64_t{64} << 10;
  if (elements <= kShortElements) return scheduler->Stage(staging);
  MakePass([&] {
    if (options.observer != nullptr) options.observer->OnGradientsRead();
    scheduler->Stage(staging);
    return absl::OkStatus();
  }).IgnoreError();  // always OK: MakePass returns what the pass does
}

double JobContext::Norm(double type,
                        const scheduler::StepScheduler::Update& update) {
  double norm = 0;
  MakePass([&] {
    if (options.observer != nullptr) options.observer->OnGradientsRead();
    norm = scheduler->Norm(type, update);
    return absl::OkStatus();
  }).IgnoreError();  // as in Stage
  return norm;
}

void JobContext::TracePush(int64_t begin_ns, uint32_t rank, uint32_t first,
                           uint32_t count) {
  if (begin_ns == 0) return;
  const RankPartition& partition = shape->partitions[rank];
  const size_t end = partition.LowerBound(first + count);
  uint64_t bytes = 0;
  for (size_t i = partition.LowerBound(first); i < end; ++i) {
    const Piece& piece = partition.pieces[i];
    bytes += piece.numel *
             SizeInBytes(layout().parameters()[piece.parameter].gradient_dtype);
  }
  step_spans.RecordSince(begin_ns, "push", 1 + rank, bytes);
}

std::string JobContext::StagingPath(uint32_t rank,
                                    uint64_t client_instance) const {
  return StagingFilePath(options.directory, rank, client_instance);
}

std::string JobContext::StateDir() const {
  return options.config.state_dir().empty() ? options.directory
                                            : options.config.state_dir();
}

}  // namespace optstate::session
