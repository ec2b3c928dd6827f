// Makes a load that all ranks have finished the job's state, whole or not at
// all.

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/first_error.h"
#include "server/session/admission.h"
#include "server/session/job_impl.h"
#include "spdlog/spdlog.h"

namespace optstate {

LoadLogHeader JobImpl::LoadHeader() const {
  LoadLogHeader header;
  header.loads_finished = record().loads_finished;
  header.incarnation = tier_->control()->incarnation;
  header.committed_step = record().committed_step;
  return header;
}

void JobImpl::DropStagedLoad() {
  staged_load_.Reset(LoadHeader());
  tier_->DropLoadLog();
}

// Grows the log in steps in proportion to its size; the last ones only as
// needed.
absl::StatusOr<absl::Span<std::byte>> JobImpl::GrowLoadLog(uint64_t bytes) {
  constexpr uint64_t kStepBytes = 64 << 10;
  const uint64_t bytes_max = StagedLoad::BytesMax(Elements(), layout_of_job(),
                                                  shape_->partitions.size());
  if (bytes > bytes_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "job \"", options_.name,
        "\": the load is in too many parts to be kept "
        "in ",
        bytes_max, " bytes. The job is unchanged; load whole arrays"));
  }
  const uint64_t wanted = (bytes + bytes / 8 + kStepBytes - 1) / kStepBytes;
  absl::Status reserved;
  for (const uint64_t each :
       {std::min(wanted * kStepBytes, bytes_max), bytes}) {
    reserved = ReserveLoadLog(each, bytes_max);
    if (reserved.ok()) return tier_->load_log();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "job \"", options_.name, "\": no room for a load, which needs up to ",
      bytes_max, " bytes beside the state (", bytes,
      " so far): ", reserved.message(),
      ". The job is unchanged. A new one is loaded without (optctl delete job ",
      options_.name, ")"));
}

absl::Status JobImpl::ReserveLoadLog(uint64_t bytes, uint64_t bytes_max) {
  OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock lock,
                            AdmissionLock::Take(StateDir()));
  AdmissionRequest request;
  request.directory = options_.directory;
  request.state_dir = StateDir();
  request.new_state_bytes = bytes - tier_->load_log().size();
  request.job_state_bytes = tier_->bytes() + request.new_state_bytes;
  request.uid = options_.uid;
  request.limits = options_.config.limits();
  OPTSTATE_RETURN_IF_ERROR(Admit(request));
  return tier_->ReserveLoadLog(bytes, bytes_max);
}

// Seals and applies the log. An engine that dies before the seal leaves the job
// unchanged; after the seal, the next engine applies all of the log again.
absl::Status JobImpl::TakeLoad() {
  StepObserver* const observer = options_.observer;
  if (!staged_load_.empty()) {
    const LoadLogSeal seal = staged_load_.Seal();
    // The compiler must move neither the log's stores down nor the state's up;
    // the processor's order does not matter, see MarkStep.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    SealLoad(seal.bytes, seal.crc32c, staged_load_.first_parameter(),
             tier_->control());
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (observer != nullptr) observer->OnLoadSealed();
    const absl::Status applied = ApplyLoad(staged_load_.records());
    if (!applied.ok()) return FailInside("a load", applied);
    if (observer != nullptr) observer->OnLoadApplied();
  }
  RecordLoad();
  if (observer != nullptr) observer->OnLoadRecorded();
  DropStagedLoad();
  return MakeDurableIfDue(/*is_load=*/true);
}

absl::Status JobImpl::ApplyLoad(absl::Span<const LoadLogRecord> records) {
  const ElementAccess elements = Elements();
  StepObserver* const observer = options_.observer;
  FirstError error;
  pool_.ParallelFor(records.size(), [&](size_t i) {
    if (error.failed()) return;
    const LoadLogEntry& entry = records[i].entry;
    error.Note(elements.Write({static_cast<v1::StateArray>(entry.array),
                               entry.parameter, entry.begin, entry.numel},
                              records[i].payload));
    if (observer != nullptr) observer->OnLoadPartApplied();
  });
  return error.status();
}

void JobImpl::RecordLoad() {
  StepRecord next = record();
  next.load_required_from = parameter_count();
  next.load_touched_from = kNoParameter;
  next.load_log_bytes = 0;
  next.load_log_crc32c = 0;
  next.load_log_sequence = 0;
  ++next.loads_finished;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  PublishRecord(next, tier_->control());
}

// Adopts a former engine's load when the job is opened. A FAILED job stays as
// it is.
absl::Status JobImpl::AdoptLoad() {
  if (!LoadIsSealed(*tier_->control())) {
    DropStagedLoad();
    AdoptUnfinishedLoad();
    return absl::OkStatus();
  }
  const auto records = OpenSealedLoad();
  if (!records.ok()) {
    return absl::DataLossError(absl::StrCat(
        "job \"", options_.name,
        "\": the engine died while it put a load into place that all ranks had "
        "finished, and what it needs to do so again, ",
        tier_->load_log_path(),
        ", cannot be used: ", records.status().message(),
        ". So the state is partly what it was before that load. ",
        HowToGoOn()));
  }
  const absl::Status applied = ApplyLoad(*records);
  if (!applied.ok()) return FailInside("a load", applied);
  RecordLoad();
  spdlog::info("load put into place after a crash: job={} step={}",
               options_.name, record().committed_step);
  DropStagedLoad();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<LoadLogRecord>> JobImpl::OpenSealedLoad() {
  const LoadLogSeal seal = {.bytes = record().load_log_bytes,
                            .crc32c = record().load_log_crc32c};
  OPTSTATE_RETURN_IF_ERROR(tier_->OpenLoadLog(seal.bytes));
  OPTSTATE_ASSIGN_OR_RETURN(std::vector<LoadLogRecord> records,
                            ReadLoadLog(tier_->load_log(), LoadHeader(), seal));
  OPTSTATE_RETURN_IF_ERROR(CheckLoadRecords(records));
  return records;
}

// Checks the records against the layout: checksums show that an engine wrote
// the log, not that it wrote it for this layout.
absl::Status JobImpl::CheckLoadRecords(
    absl::Span<const LoadLogRecord> records) const {
  const ElementAccess elements = Elements();
  for (const auto& [entry, payload] : records) {
    const auto array = static_cast<v1::StateArray>(entry.array);
    if (ElementAccess::IsPerParameter(array)) {
      OPTSTATE_RETURN_IF_ERROR(
          CheckNumbers(array, entry.begin, entry.numel, entry.payload_bytes));
      continue;
    }
    OPTSTATE_RETURN_IF_ERROR(CheckParameterRange(entry.parameter, 1));
    OPTSTATE_RETURN_IF_ERROR(
        elements.Check({array, entry.parameter, entry.begin, entry.numel}));
    OPTSTATE_RETURN_IF_ERROR(CheckDataBytes(
        elements.PayloadBytes(array, entry.numel), entry.payload_bytes));
  }
  return absl::OkStatus();
}

// Requires an interrupted load in place again from where it had written, and
// likewise any load of a former build.
void JobImpl::AdoptUnfinishedLoad() {
  if (record().load_touched_from == kNoParameter) return;
  StepRecord next = record();
  next.load_required_from =
      std::min(next.load_required_from, next.load_touched_from);
  PublishRecord(next, tier_->control());
}

// Adopts the load in which an engine of a former build died; such a build
// overwrote masters of a READY job in place, a few at a time.
absl::Status JobImpl::AdoptLoadedMasters() {
  ControlFile& control = *tier_->control();
  const uint64_t one_more =
      control.parameter_loading.load(std::memory_order_relaxed);
  if (one_more == 0) return absl::OkStatus();
  const auto parameters = layout_of_job().parameters();
  const auto numel = static_cast<uint64_t>(parameters[one_more - 1].numel);
  if (control.loading_numel > kLoadBlockElements ||
      control.loading_begin > numel ||
      control.loading_numel > numel - control.loading_begin) {
    return absl::DataLossError(
        absl::StrCat("control: a load was overwriting ", control.loading_numel,
                     " elements from ", control.loading_begin, " of parameter ",
                     one_more - 1, ", which has ", numel));
  }
  OPTSTATE_RETURN_IF_ERROR(Elements().Write(
      {.array = v1::STATE_ARRAY_MASTER,
       .parameter = static_cast<uint32_t>(one_more - 1),
       .begin = control.loading_begin,
       .numel = control.loading_numel},
      reinterpret_cast<const std::byte*>(control.loading_masters)));
  std::atomic_signal_fence(std::memory_order_seq_cst);
  control.parameter_loading.store(0, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace optstate
