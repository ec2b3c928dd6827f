#include "server/scheduler/passes/log_replay.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/dtype.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/first_error.h"
#include "server/scheduler/tile_view.h"

namespace optstate::scheduler {
namespace {

// Where a run lies in the layout.
struct RunPlace {
  uint32_t parameter = 0;
  uint64_t begin = 0;
  uint64_t numel = 0;
};

std::vector<RunPlace> PlacesOfRuns(const StepPlan& plan) {
  std::vector<RunPlace> places(plan.layout().run_count());
  const auto count = static_cast<uint32_t>(plan.layout().parameters().size());
  for (uint32_t p = 0; p < count; ++p) {
    plan.ForEachRunOf(p, [&](uint64_t run, uint64_t begin, uint64_t numel) {
      places[run] = {p, begin, numel};
    });
  }
  return places;
}

class LogReplay {
 public:
  LogReplay(const StepPlan* plan, const StepMemory* memory,
            const GradientLog* log)
      : plan_(*plan),
        memory_(*memory),
        log_(*log),
        places_(PlacesOfRuns(*plan)) {}

  absl::Status Check() const {
    std::vector<GradientLog::TileBytes> bytes(places_.size());
    for (size_t run = 0; run < places_.size(); ++run) {
      const RunPlace& place = places_[run];
      const kernels::UpdateKernelKey& key = KernelOf(place.parameter).key;
      bytes[run].gradient = place.numel * SizeInBytes(key.gradient);
      if (key.master != MasterFormat::kFloat32) {
        bytes[run].parameter = place.numel * SizeInBytes(key.parameter);
      }
    }
    return log_.Check(places_.size(), bytes);
  }

  // Finishes the run that the slot names, if it is in the middle of one.
  absl::Status FinishSlot(WorkerUndo* undo) const {
    const auto kind = static_cast<UndoKind>(undo->kind.load());
    if (kind != UndoKind::kReplay) return absl::OkStatus();
    for (uint64_t tile = 0; tile < log_.tiles(); ++tile) {
      if (log_.run(tile) != undo->run || !log_.is_resident(tile)) continue;
      const auto& kernel = KernelOf(places_[undo->run].parameter);
      return Visit(undo->run, [&](const kernels::TileView& view) {
        return FinishReplay(log_, tile, kernel.key, *kernel.functions, view,
                            undo);
      });
    }
    // It was brought up to date, and then had nothing more to do with the log.
    undo->Clear();
    return absl::OkStatus();
  }

  // Applies what the tile's record lacks.
  absl::Status Replay(uint64_t tile, WorkerUndo* undo) const {
    if (!log_.is_resident(tile)) return absl::OkStatus();
    const uint64_t run = log_.run(tile);
    const uint64_t stamp = memory_.recovery.run_stamps[run].load();
    const auto& kernel = KernelOf(places_[run].parameter);
    return Visit(run, [&](const kernels::TileView& view) -> absl::Status {
      const uint64_t has =
          scheduler::Replay(log_, tile, stamp, *kernel.functions, view, undo);
      if (has == stamp) {
        // A parameter that is a part of its master may be half written: the
        // process died in it. This is the one that goes with the stamp.
        if (const std::byte* const kept = log_.kept_parameter(tile);
            kept != nullptr) {
          std::memcpy(view.parameter, kept,
                      view.numel * SizeInBytes(kernel.key.parameter));
        }
        return absl::OkStatus();
      }
      return absl::DataLossError(absl::StrCat(
          "gradient_log: the record of run ", run, " is of step ", has,
          ", the gradients up to step ", stamp, " are not there"));
    });
  }

 private:
  // Returns the kernel for what an entry has.
  const StepPlan::Kernel& KernelOf(uint32_t parameter) const {
    return log_.content() == GradientLog::Content::kSum
               ? plan_.sum_kernel(parameter)
               : plan_.kernel(parameter);
  }
  absl::Status Visit(
      uint64_t run,
      absl::FunctionRef<absl::Status(const kernels::TileView&)> visit) const {
    const RunPlace& place = places_[run];
    absl::Status status;
    OPTSTATE_RETURN_IF_ERROR(memory_.store->ForEachRecord(
        place.parameter, place.begin, place.numel,
        storage::StateStore::Access::kWrite,
        [&](const storage::RecordView& record, uint64_t begin, uint64_t numel) {
          status = visit(TileViewOf(plan_.layout(), record, place.parameter,
                                    begin, numel));
        }));
    return status;
  }

  const StepPlan& plan_;
  const StepMemory& memory_;
  const GradientLog& log_;
  const std::vector<RunPlace> places_;  // by run
};

}  // namespace

absl::Status ReplayLog(const StepPlan& plan, const StepMemory& memory,
                       GradientLog* log, WorkerPool* pool) {
  if (log->is_empty() || plan.non_separable_kernel() != nullptr) {
    return absl::OkStatus();
  }
  const LogReplay replay(&plan, &memory, log);
  OPTSTATE_RETURN_IF_ERROR(replay.Check());
  for (WorkerUndo& undo : memory.undo) {
    OPTSTATE_RETURN_IF_ERROR(replay.FinishSlot(&undo));
  }
  OPTSTATE_RETURN_IF_ERROR(replay.FinishSlot(log->spare_undo()));
  if (log->tiles() == 0) return absl::OkStatus();
  // The others name runs of the step in progress, which are to be put right
  // when this is done.
  std::vector<WorkerUndo*> free;
  for (WorkerUndo& undo : memory.undo) {
    if (undo.kind.load() == 0) free.push_back(&undo);
  }
  if (free.empty()) free.push_back(log->spare_undo());
  const size_t parts =
      std::min(free.size(), static_cast<size_t>(pool->participants()));
  FirstError error;
  pool->ParallelFor(parts, [&](size_t part) {
    for (uint64_t tile = part; tile < log->tiles(); tile += parts) {
      if (error.failed()) return;
      error.Note(replay.Replay(tile, free[part]));
    }
  });
  OPTSTATE_RETURN_IF_ERROR(error.status());
  log->Clear();
  return absl::OkStatus();
}

}  // namespace optstate::scheduler
