#include "storage/format/control_file.h"

#include <atomic>
#include <bit>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/format/checksum.h"

namespace optstate::storage {
namespace {

uint32_t HeaderChecksum(const ControlFile& control, uint32_t version) {
  const uint64_t fields[4] = {control.magic, version, control.incarnation,
                              static_cast<uint64_t>(control.created_at_ns)};
  return Crc32c(fields, sizeof(fields));
}

uint32_t RecordChecksum(const StepRecord& record) {
  return Crc32c(&record, offsetof(StepRecord, crc32c));
}

absl::Status CheckHeader(const ControlFile& control, uint64_t incarnation) {
  if (control.magic != kControlMagic) {
    return absl::DataLossError(
        absl::StrFormat("magic is %016x, expected %016x: not a control file",
                        control.magic, kControlMagic));
  }
  if (control.version < kControlVersion ||
      control.version > kControlVersionLaggingSums) {
    return absl::DataLossError(absl::StrCat(
        "format version is ", control.version, ", this optstated reads ",
        kControlVersion, " to ", kControlVersionLaggingSums));
  }
  if (control.header_crc32c != HeaderChecksum(control, control.version)) {
    return absl::DataLossError("the header's checksum is wrong");
  }
  if (control.incarnation != incarnation) {
    return absl::DataLossError(
        absl::StrFormat("belongs to incarnation %016x of the job, job.binpb to "
                        "%016x",
                        control.incarnation, incarnation));
  }
  return absl::OkStatus();
}

// Checks fields that mostly have no checksum, and some of which are used as an
// index.
absl::Status CheckBounds(const ControlFile& control, uint64_t parameter_count) {
  const StepRecord& record = CurrentRecord(control);
  const uint64_t next = record.committed_step + 1;
  const uint64_t touched =
      record.load_touched_from == kNoParameter ? 0 : record.load_touched_from;
  const struct {
    const char* name;
    uint64_t value;
    uint64_t most;
  } fields[] = {
      {"counts_begun", control.counts_begun.load(), parameter_count},
      {"step_speculated", control.step_speculated.load(), next},
      {"parameter_loading", control.parameter_loading.load(), parameter_count},
      {"step_given_up", control.step_given_up.load(), next},
      {"step_prepared", control.step_prepared.load(), next},
      {"step_clipped", control.step_clipped.load(), next},
      {"load_required_from", record.load_required_from, parameter_count},
      {"load_touched_from", touched, parameter_count},
  };
  for (const auto& field : fields) {
    if (field.value <= field.most) continue;
    return absl::DataLossError(absl::StrCat(field.name, " is ", field.value,
                                            ", it can be ", field.most,
                                            " at most"));
  }
  return absl::OkStatus();
}

}  // namespace

void InitControlFile(uint64_t incarnation, int64_t created_at_ns,
                     const StepRecord& record, ControlFile* control) {
  control->magic = kControlMagic;
  control->version = kControlVersion;
  control->incarnation = incarnation;
  control->created_at_ns = created_at_ns;
  control->header_crc32c = HeaderChecksum(*control, control->version);
  PublishRecord(record, control);
}

bool MayLag(const ControlFile& control) {
  return control.version != kControlVersion;
}

void SetLag(Lag lag, ControlFile* control) {
  static_assert(offsetof(ControlFile, version) % sizeof(uint64_t) == 0 &&
                offsetof(ControlFile, header_crc32c) ==
                    offsetof(ControlFile, version) + sizeof(uint32_t));
  static_assert(std::endian::native == std::endian::little);
  static_assert(kControlVersionLagging == kControlVersion + 1 &&
                kControlVersionLaggingSums == kControlVersion + 2);
  const uint32_t version = kControlVersion + static_cast<uint32_t>(lag);
  const uint64_t both =
      uint64_t{HeaderChecksum(*control, version)} << 32 | version;
  auto* const at =
      reinterpret_cast<std::byte*>(control) + offsetof(ControlFile, version);
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(at))
      .store(both, std::memory_order_relaxed);
}

absl::Status CheckCurrentRecord(const ControlFile& control,
                                uint64_t incarnation) {
  absl::Status header = CheckHeader(control, incarnation);
  if (!header.ok()) return header;
  const StepRecord& record = CurrentRecord(control);
  if (record.crc32c != RecordChecksum(record)) {
    return absl::DataLossError("the current step record's checksum is wrong");
  }
  return absl::OkStatus();
}

absl::Status CheckControlFile(const ControlFile& control, uint64_t incarnation,
                              uint64_t parameter_count) {
  absl::Status current = CheckCurrentRecord(control, incarnation);
  if (!current.ok()) return current;
  const StepRecord& record = CurrentRecord(control);
  const uint64_t mark =
      control.step_in_progress.load(std::memory_order_acquire);
  // Both name the step between its record and the clearing of its mark.
  if (mark != 0 && mark != record.committed_step &&
      mark != record.committed_step + 1) {
    return absl::DataLossError(absl::StrCat(
        "says that step ", mark, " is in progress after committed step ",
        record.committed_step));
  }
  return CheckBounds(control, parameter_count);
}

const StepRecord& CurrentRecord(const ControlFile& control) {
  return control.records[control.sequence.load(std::memory_order_acquire) % 2];
}

bool LoadIsSealed(const ControlFile& control) {
  const uint64_t sealed_by = CurrentRecord(control).load_log_sequence;
  return sealed_by != 0 && sealed_by == control.sequence.load();
}

void PublishRecord(StepRecord record, ControlFile* control) {
  record.crc32c = RecordChecksum(record);
  const uint64_t next = control->sequence.load(std::memory_order_relaxed) + 1;
  control->records[next % 2] = record;
  // The store is a release: a process that finds the sequence finds the record,
  // in this process or, after a kill, in the next one.
  control->sequence.store(next, std::memory_order_release);
}

void SealLoad(uint64_t bytes, uint32_t crc32c, uint32_t touched_from,
              ControlFile* control) {
  StepRecord next = CurrentRecord(*control);
  next.load_touched_from = touched_from;
  next.load_log_bytes = bytes;
  next.load_log_crc32c = crc32c;
  next.load_log_sequence = control->sequence.load() + 1;
  PublishRecord(next, control);
}

}  // namespace optstate::storage
