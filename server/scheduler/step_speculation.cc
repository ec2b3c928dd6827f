// Updates before it is known whether they are wanted.

#include <atomic>
#include <cstring>

#include "kernels/cast.h"
#include "server/scheduler/step_scheduler.h"

namespace optstate {
namespace {

uint64_t EntryBytes(const Layout& layout) {
  return (layout.run_count() * sizeof(uint64_t) + 63) / 64 * 64;
}

}  // namespace

uint64_t StepScheduler::SpeculationBytes(const Layout& layout) {
  const uint64_t arrays = layout.any_amsgrad() ? 4 : 3;
  return EntryBytes(layout) + arrays * layout.flat_elements() * sizeof(float);
}

std::atomic<uint64_t>& StepScheduler::SpeculatedStep(uint64_t run) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(
      options_.speculation.data())[run];
}

float* StepScheduler::SpeculatedArray(int array, uint64_t flat) const {
  auto* const arrays = reinterpret_cast<float*>(options_.speculation.data() +
                                                EntryBytes(*options_.layout));
  return arrays +
         static_cast<uint64_t>(array) * options_.layout->flat_elements() + flat;
}

// The copy is whole before the entry says so, and the entry before the first
// new value is stored: as everywhere, against the end of the process.
void StepScheduler::KeepRun(uint64_t run, uint64_t step, const TileView& view,
                            uint64_t flat) {
  std::memcpy(SpeculatedArray(0, flat), view.master,
              view.numel * sizeof(float));
  for (int k = 0; k < kMaxStateArrays; ++k) {
    if (view.state[k] == nullptr) continue;
    std::memcpy(SpeculatedArray(1 + k, flat), view.state[k],
                view.numel * sizeof(float));
  }
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
  const TileView view = ViewOf(parameter, begin, numel);
  const uint64_t flat = layout.flat_offset(parameter) + begin;
  std::memcpy(view.master, SpeculatedArray(0, flat), numel * sizeof(float));
  for (int k = 0; k < kMaxStateArrays; ++k) {
    if (view.state[k] == nullptr) continue;
    std::memcpy(view.state[k], SpeculatedArray(1 + k, flat),
                numel * sizeof(float));
  }
  CastFromFloat(layout.parameters()[parameter].dtype, view.master,
                view.parameter, numel);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  options_.recovery.run_stamps[run].store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  SpeculatedStep(run).store(0, std::memory_order_relaxed);
}

void StepScheduler::TakeBackSpeculation(uint64_t step) {
  // Of a process that died: whole runs are put back, whatever was in flight.
  for (WorkerUndo& undo : worker_undos()) undo.Clear();
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
