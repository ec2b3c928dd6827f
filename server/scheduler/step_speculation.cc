// Updates before it is known whether they are wanted.

#include <atomic>
#include <cstring>

#include "kernels/cast.h"
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

// Of each element 4 bytes, whatever the masters are made of.
std::byte* StepScheduler::KeptMaster(uint64_t flat) const {
  return options_.speculation.data() + SpeculationEntryBytes(*options_.layout) +
         flat * sizeof(float);
}

// The copy is whole before the entry says so, and the entry before the first
// new value is stored: as everywhere, against the end of the process.
void StepScheduler::KeepRun(uint64_t run, uint64_t step, uint32_t parameter,
                            uint64_t begin, uint64_t numel) {
  const Layout& layout = *options_.layout;
  const uint64_t flat = layout.flat_offset(parameter) + begin;
  std::byte* kept = KeptMaster(flat);
  ForEachMasterPart(parameter, begin, numel,
                    [&kept](const std::byte* data, uint64_t bytes) {
                      std::memcpy(kept, data, bytes);
                      kept += bytes;
                    });
  ForEachColumn(layout.parameters()[parameter].group, flat, numel,
                [&](const Column& column, uint64_t first, uint64_t bytes) {
                  std::memcpy(
                      options_.speculation.data() + column.kept_at + first,
                      column.base + first, bytes);
                });
  std::atomic_signal_fence(std::memory_order_seq_cst);
  SpeculatedStep(run).store(step, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void StepScheduler::Speculate(Update update) {
  update.speculative = true;
  options_.control->step_speculated.store(update.step,
                                          std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  options_.pool->ParallelFor(runs_.subgroups().size(), [&](size_t i) {
    ApplySubGroup(runs_.subgroups()[i], update);
  });
}

// Broken off, it is begun again: a run that has its old values back can be
// given them once more until its entry is gone.
void StepScheduler::TakeBackRun(uint32_t parameter, uint64_t run,
                                uint64_t begin, uint64_t numel) {
  const Layout& layout = *options_.layout;
  const uint64_t flat = layout.flat_offset(parameter) + begin;
  const std::byte* kept = KeptMaster(flat);
  ForEachMasterPart(parameter, begin, numel,
                    [&kept](std::byte* data, uint64_t bytes) {
                      std::memcpy(data, kept, bytes);
                      kept += bytes;
                    });
  ForEachColumn(layout.parameters()[parameter].group, flat, numel,
                [&](const Column& column, uint64_t first, uint64_t bytes) {
                  std::memcpy(
                      column.base + first,
                      options_.speculation.data() + column.kept_at + first,
                      bytes);
                });
  if (layout.master_format(parameter) == MasterFormat::kFloat32) {
    const TileView view = ViewOf(parameter, begin, numel);
    CastFromFloat(layout.parameters()[parameter].dtype,
                  static_cast<const float*>(view.master), view.parameter,
                  numel);
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
  options_.recovery.run_stamps[run].store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  SpeculatedStep(run).store(0, std::memory_order_relaxed);
}

void StepScheduler::TakeBackSpeculation(uint64_t step) {
  // Of a process that died: whole runs are put back, whatever update was in
  // flight. A sum that was is rolled back by itself.
  for (WorkerUndo& undo : worker_undos()) {
    if (undo.kind.load(std::memory_order_relaxed) !=
        static_cast<uint64_t>(UndoKind::kAccumulate)) {
      undo.Clear();
    }
  }
  ForEachElementRange(0, [&](uint32_t p, uint64_t begin, uint64_t numel) {
    runs_.ForEachRun(
        p, begin, begin + numel,
        [&](uint64_t run, uint64_t run_begin, uint64_t run_numel) {
          if (SpeculatedStep(run).load(std::memory_order_relaxed) == step) {
            TakeBackRun(p, run, run_begin, run_numel);
          }
        });
  });
  std::atomic_signal_fence(std::memory_order_seq_cst);
  options_.control->step_speculated.store(0, std::memory_order_relaxed);
}

}  // namespace optstate
