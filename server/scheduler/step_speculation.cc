// Updates parameters before their step is decided.

#include <atomic>
#include <cstring>

#include "kernels/cast.h"
#include "proto/types/array_format.h"
#include "proto/types/runs.h"
#include "server/scheduler/step_scheduler.h"

namespace optstate {

uint64_t StepScheduler::SpeculationEntryBytes(const Layout& layout) {
  return (layout.run_count() * sizeof(uint64_t) + 63) / 64 * 64;
}

uint64_t StepScheduler::SpeculationBytes(const Layout& layout) {
  const uint64_t blocks = layout.flat_elements() / kQuantizedBlockElements;
  uint64_t block_bytes = kQuantizedBlockElements * sizeof(float);
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout.has_state_array(k)) continue;
    block_bytes += kQuantizedBlockElements * SizeInBytes(layout.state_format());
    if (layout.state_format() == StateFormat::kDynamic8) {
      block_bytes += sizeof(float);
    }
  }
  return SpeculationEntryBytes(layout) + blocks * block_bytes;
}

std::atomic<uint64_t>& StepScheduler::SpeculatedStep(uint64_t run) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(
      options_.speculation.data())[run];
}

// Returns the kept master; each element has 4 bytes, in any format of masters.
std::byte* StepScheduler::KeptMaster(uint64_t flat) const {
  return options_.speculation.data() + SpeculationEntryBytes(layout_) +
         flat * sizeof(float);
}

// Returns the kept state; behind the masters lie the other arrays, each whole:
// a state array, then its scales.
std::byte* StepScheduler::KeptState(int part, uint64_t flat) const {
  std::byte* kept = KeptMaster(layout_.flat_elements());
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout_.has_state_array(k)) continue;
    for (const int before : {kStatePart0 + k, kScalePart0 + k}) {
      if (before == part) {
        return kept + PartBytesOf(layout_, part, flat, 0).begin;
      }
      if (before >= kScalePart0 &&
          ArrayFormat(layout_, k) != StateFormat::kDynamic8) {
        continue;
      }
      kept += PartBytesOf(layout_, before, 0, layout_.flat_elements()).end;
    }
  }
  return kept;
}

// Keeps a run's values. The copy is complete before the entry says so, and the
// entry before the first new value is stored: as everywhere, this protects
// against the end of the process.
void StepScheduler::KeepRun(const RecordView& record, uint64_t run,
                            uint64_t step, uint32_t parameter, uint64_t begin,
                            uint64_t numel) {
  const uint64_t flat = layout_.flat_offset(parameter) + begin;
  std::byte* kept = KeptMaster(flat);
  record.ForEachMasterPart(parameter, begin, numel,
                           [&kept](absl::Span<const std::byte> bytes) {
                             std::memcpy(kept, bytes.data(), bytes.size());
                             kept += bytes.size();
                           });
  record.ForEachStatePart(parameter, begin, numel,
                          [&](int part, absl::Span<const std::byte> bytes) {
                            std::memcpy(KeptState(part, flat), bytes.data(),
                                        bytes.size());
                          });
  std::atomic_signal_fence(std::memory_order_seq_cst);
  SpeculatedStep(run).store(step, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

absl::Status StepScheduler::Speculate(Update update) {
  update.speculative = true;
  options_.control->step_speculated.store(update.step,
                                          std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return MakePass(update);
}

// Rolls back a run. If interrupted, this is repeated: a restored run can be
// restored once more until its entry is gone.
void StepScheduler::TakeBackRun(const RecordView& record, uint32_t parameter,
                                uint64_t run, uint64_t begin, uint64_t numel) {
  const uint64_t flat = layout_.flat_offset(parameter) + begin;
  const std::byte* kept = KeptMaster(flat);
  record.ForEachMasterPart(parameter, begin, numel,
                           [&kept](absl::Span<std::byte> bytes) {
                             std::memcpy(bytes.data(), kept, bytes.size());
                             kept += bytes.size();
                           });
  record.ForEachStatePart(
      parameter, begin, numel, [&](int part, absl::Span<std::byte> bytes) {
        std::memcpy(bytes.data(), KeptState(part, flat), bytes.size());
      });
  if (layout_.master_format(parameter) == MasterFormat::kFloat32) {
    CastFromFloat(
        layout_.parameters()[parameter].dtype,
        reinterpret_cast<const float*>(record.master(parameter, begin)),
        record.parameter(parameter, begin), numel);
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
  options_.recovery.run_stamps[run].store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  SpeculatedStep(run).store(0, std::memory_order_relaxed);
}

absl::Status StepScheduler::TakeBackSpeculation(uint64_t step) {
  // After a crash, whole runs are restored, so an update in flight is dropped.
  // A sum in flight is rolled back by itself.
  for (WorkerUndo& undo : worker_undos()) {
    if (undo.kind.load(std::memory_order_relaxed) !=
        static_cast<uint64_t>(UndoKind::kAccumulate)) {
      undo.Clear();
    }
  }
  OPTSTATE_RETURN_IF_ERROR(
      ForEachElementRange(0, [&](const RecordView& record, uint32_t p,
                                 uint64_t begin, uint64_t numel) {
        ForEachRun(
            layout_, p, begin, begin + numel,
            [&](uint64_t run, uint64_t run_begin, uint64_t run_numel) {
              if (SpeculatedStep(run).load(std::memory_order_relaxed) == step) {
                TakeBackRun(record, p, run, run_begin, run_numel);
              }
            });
      }));
  std::atomic_signal_fence(std::memory_order_seq_cst);
  options_.control->step_speculated.store(0, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace optstate
