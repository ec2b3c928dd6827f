#include "server/session/transfer/load_applier.h"

#include <chrono>
#include <cstddef>
#include <set>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/first_error.h"
#include "server/session/transfer/damaged_records.h"
#include "server/session/transfer/range_checks.h"
#include "spdlog/spdlog.h"
#include "storage/persist_in_order.h"

namespace optstate::session {
namespace {

// Makes the record that of a job which has taken its last step without a
// gradient. The commit of that step was another job's: none is a repeat of it.
void SetBegin(const BeginAt& at, storage::StepRecord* record) {
  record->loads_finished = at.loads_finished;
  if (at.step == 0) return;
  record->committed_step = at.step;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  record->committed_at_ns = std::chrono::nanoseconds(now).count();
  record->commit_digest = 0;
  record->gradient_norm = 0;
  record->clip_coefficient = 1;
  record->update_ns = 0;
  record->flags = storage::kStepRecordHasOutcome | storage::kStepRecordApplied;
  record->prepared_digest = 0;
}

}  // namespace

// Seals and applies the log. An engine that dies before the seal leaves the job
// unchanged; after the seal, the next engine applies all of the log again.
absl::Status LoadApplier::CommitLoad(const std::optional<BeginAt>& begin_at) {
  scheduler::StepObserver* const observer = job_.options.observer;
  if (!load_.staged.empty()) {
    const std::vector<storage::LoadLogRecord> records = load_.staged.records();
    const absl::Status replaced =
        CheckReplaced(load_.staged.damaged(), *job_.store, records);
    if (!replaced.ok()) return job_.FailInside("a load", replaced);
    absl::Status kept = job_.AccessRecords([&] {
      return CheckLeftOut(load_.staged.left_out(), job_.store.get(), records);
    });
    if (absl::IsAborted(kept)) {
      log_.DropLog();
      return kept;
    }
    if (!kept.ok()) return job_.FailInside("a load", kept);
    const storage::LoadLogSeal seal = load_.staged.Seal();
    // The compiler must move neither the log's stores down nor the state's up;
    // the processor's order does not matter, see MarkStep.
    storage::PersistInOrder(storage::PersistPoint::kLoadSeal);
    storage::SealLoad(seal.bytes, seal.crc32c, load_.staged.first_parameter(),
                      job_.tier->control());
    storage::PersistInOrder(storage::PersistPoint::kLoadInPlace);
    if (observer != nullptr) observer->OnLoadSealed();
    const absl::Status applied =
        job_.MakeCountingPass([&] { return ApplyLoad(records); });
    if (!applied.ok()) return job_.FailInside("a load", applied);
    if (observer != nullptr) observer->OnLoadApplied();
  }
  RecordLoad(begin_at);
  if (observer != nullptr) observer->OnLoadRecorded();
  log_.DropLog();
  return durability_.MakeDurableIfDue(/*is_load=*/true);
}

// Damage may be found only now, also by an engine that adopts the load. That of
// a record which was in memory is found when the others have driven it out.
absl::Status LoadApplier::ApplyLoad(
    absl::Span<const storage::LoadLogRecord> records) {
  std::set<size_t> replaced;
  absl::Status written = WriteLoad(records);
  while (absl::IsDataLoss(written)) {
    const size_t before = replaced.size();
    OPTSTATE_RETURN_IF_ERROR(
        ReplaceDamaged(job_.store.get(), records, &replaced));
    // Records that this load has replaced are damaged again: the disk does not
    // keep what is written to it.
    if (replaced.size() == before) break;
    written = WriteLoad(records);
  }
  return written;
}

absl::Status LoadApplier::WriteLoad(
    absl::Span<const storage::LoadLogRecord> records) {
  const ElementAccess elements = job_.Elements();
  scheduler::StepObserver* const observer = job_.options.observer;
  scheduler::FirstError error;
  job_.pool.ParallelFor(records.size(), [&](size_t i) {
    if (error.failed()) return;
    const storage::LoadLogEntry& entry = records[i].entry;
    error.Note(elements.Write({static_cast<v1::StateArray>(entry.array),
                               entry.parameter, entry.begin, entry.numel},
                              records[i].payload));
    if (observer != nullptr) observer->OnLoadPartApplied();
  });
  return error.status();
}

void LoadApplier::RecordLoad(const std::optional<BeginAt>& begin_at) {
  storage::StepRecord next = job_.record();
  next.load_required_from = job_.parameter_count();
  next.load_touched_from = storage::kNoParameter;
  next.load_log_bytes = 0;
  next.load_log_crc32c = 0;
  next.load_log_sequence = 0;
  ++next.loads_finished;
  if (begin_at.has_value()) SetBegin(*begin_at, &next);
  storage::PersistInOrder(storage::PersistPoint::kLoadRecord);
  storage::PublishRecord(next, job_.tier->control());
}

// Adopts a former engine's load when the job is opened. A FAILED job stays as
// it is.
absl::Status LoadApplier::AdoptLoad() {
  if (!storage::LoadIsSealed(*job_.tier->control())) {
    log_.DropLog();
    rounds_.AdoptUnfinishedLoad();
    return absl::OkStatus();
  }
  const auto records = OpenSealedLoad();
  if (!records.ok()) {
    return absl::DataLossError(absl::StrCat(
        "job \"", job_.options.name,
        "\": the engine died while it put a load into place that all ranks had "
        "finished, and what it needs to do so again, ",
        job_.tier->load_log_path(),
        ", cannot be used: ", records.status().message(),
        ". So the state is partly what it was before that load. ",
        job_.DescribeWayOn()));
  }
  const absl::Status applied =
      job_.MakeCountingPass([&] { return ApplyLoad(*records); });
  if (!applied.ok()) return job_.FailInside("a load", applied);
  RecordLoad(std::nullopt);
  spdlog::info("load put into place after a crash: job={} step={}",
               job_.options.name, job_.record().committed_step);
  log_.DropLog();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<storage::LoadLogRecord>>
LoadApplier::OpenSealedLoad() {
  const storage::LoadLogSeal seal = {.bytes = job_.record().load_log_bytes,
                                     .crc32c = job_.record().load_log_crc32c};
  OPTSTATE_RETURN_IF_ERROR(job_.tier->OpenLoadLog(seal.bytes));
  OPTSTATE_ASSIGN_OR_RETURN(
      std::vector<storage::LoadLogRecord> records,
      storage::ReadLoadLog(job_.tier->load_log(), log_.MakeLogHeader(), seal));
  OPTSTATE_RETURN_IF_ERROR(CheckLoadRecords(records));
  return records;
}

// Checks the records against the layout: checksums show that an engine wrote
// the log, not that it wrote it for this layout.
absl::Status LoadApplier::CheckLoadRecords(
    absl::Span<const storage::LoadLogRecord> records) const {
  const ElementAccess elements = job_.Elements();
  for (const auto& [entry, payload] : records) {
    const auto array = static_cast<v1::StateArray>(entry.array);
    if (ElementAccess::IsPerParameter(array)) {
      OPTSTATE_RETURN_IF_ERROR(CheckNumbers(job_, array, entry.begin,
                                            entry.numel, entry.payload_bytes));
      continue;
    }
    OPTSTATE_RETURN_IF_ERROR(job_.CheckParameterRange(entry.parameter, 1));
    OPTSTATE_RETURN_IF_ERROR(
        elements.Check({array, entry.parameter, entry.begin, entry.numel}));
    OPTSTATE_RETURN_IF_ERROR(CheckDataBytes(
        elements.PayloadBytes(array, entry.numel), entry.payload_bytes));
  }
  return absl::OkStatus();
}

// Adopts the load in which an engine of a former build died; such a build
// overwrote masters of a READY job in place, a few at a time.
absl::Status LoadApplier::AdoptLoadedMasters() {
  storage::ControlFile& control = *job_.tier->control();
  const uint64_t one_more =
      control.parameter_loading.load(std::memory_order_relaxed);
  if (one_more == 0) return absl::OkStatus();
  const auto parameters = job_.layout().parameters();
  const auto numel = static_cast<uint64_t>(parameters[one_more - 1].numel);
  if (control.loading_numel > storage::kLoadBlockElements ||
      control.loading_begin > numel ||
      control.loading_numel > numel - control.loading_begin) {
    return absl::DataLossError(
        absl::StrCat("control: a load was overwriting ", control.loading_numel,
                     " elements from ", control.loading_begin, " of parameter ",
                     one_more - 1, ", which has ", numel));
  }
  OPTSTATE_RETURN_IF_ERROR(job_.Elements().Write(
      {.array = v1::STATE_ARRAY_MASTER,
       .parameter = static_cast<uint32_t>(one_more - 1),
       .begin = control.loading_begin,
       .numel = control.loading_numel},
      reinterpret_cast<const std::byte*>(control.loading_masters)));
  storage::PersistInOrder(storage::PersistPoint::kParameterLoading);
  control.parameter_loading.store(0, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace optstate::session
