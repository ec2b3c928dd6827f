#include "server/scheduler/step_scheduler.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cast.h"
#include "kernels/reduce.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

uint64_t NumelOf(const ParameterSpec& spec) {
  return static_cast<uint64_t>(spec.numel);
}

absl::StatusOr<const UpdateKernel*> KernelOf(const Layout& layout,
                                             const ParameterSpec& spec,
                                             bool accumulate) {
  UpdateKernelKey key;
  key.optimizer = layout.optimizer();
  key.amsgrad = layout.groups()[spec.group].amsgrad;
  key.gradient = accumulate ? DType::kFloat32 : spec.gradient_dtype;
  key.parameter = spec.dtype;
  return FindUpdateKernel(key);
}

float* ArrayNamed(absl::string_view name, const StateArrays& arrays) {
  if (name == "exp_avg") return arrays.exp_avg;
  if (name == "exp_avg_sq") return arrays.exp_avg_sq;
  if (name == "max_exp_avg_sq") return arrays.max_exp_avg_sq;
  return nullptr;
}

}  // namespace

StepScheduler::StepScheduler(const Options& options)
    : options_(options),
      runs_(options.layout, options.subgroup_elements),
      state_(options.layout->groups().size(), StateBases{}),
      run_sums_(runs_.run_count(), 0) {}

absl::Status StepScheduler::CheckKernels(const Layout& layout,
                                         bool accumulate) {
  for (const ParameterSpec& spec : layout.parameters()) {
    OPTSTATE_RETURN_IF_ERROR(
        Annotate(KernelOf(layout, spec, accumulate).status(), spec.name));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StepScheduler>> StepScheduler::Create(
    const Options& options) {
  std::unique_ptr<StepScheduler> scheduler(new StepScheduler(options));
  OPTSTATE_RETURN_IF_ERROR(scheduler->ResolveKernels());
  return scheduler;
}

absl::Status StepScheduler::ResolveKernels() {
  const bool accumulate = options_.arrays.accumulator != nullptr;
  kernels_.reserve(options_.layout->parameters().size());
  for (const ParameterSpec& spec : options_.layout->parameters()) {
    OPTSTATE_ASSIGN_OR_RETURN(const UpdateKernel* kernel,
                              KernelOf(*options_.layout, spec, accumulate));
    kernels_.push_back(kernel);
    StateBases& bases = state_[spec.group];
    for (size_t i = 0; i < kernel->state_array_names.size(); ++i) {
      const absl::string_view name = kernel->state_array_names[i];
      bases[i] = ArrayNamed(name, options_.arrays);
      if (bases[i] == nullptr) {
        return absl::UnimplementedError(
            absl::StrCat("the host tier has no array \"", name, "\""));
      }
    }
  }
  return absl::OkStatus();
}

void StepScheduler::SetPartitions(absl::Span<const RankPartition> partitions) {
  partitions_ = partitions;
  pieces_.emplace(static_cast<uint32_t>(options_.layout->parameters().size()),
                  partitions);
}

void StepScheduler::Stage(uint32_t rank, const std::byte* gradient_area,
                          size_t first_piece,
                          absl::Span<const StageAction> actions,
                          uint64_t staged_mark) {
  if (actions.empty()) return;
  const auto& pieces = partitions_[rank].pieces;
  const auto subgroup_of = [&](const Piece& piece, uint64_t element) {
    const uint32_t p = piece.parameter;
    return runs_.SubGroupOf(options_.layout->parameters()[p].group,
                            options_.layout->flat_offset(p) + element);
  };
  // Pieces without elements at either end have nothing to schedule.
  const Piece* first = &pieces[first_piece];
  const Piece* last = first + actions.size() - 1;
  while (first <= last && first->numel == 0) ++first;
  while (last > first && last->numel == 0) --last;
  if (first > last) return;
  const uint32_t begin = subgroup_of(*first, first->begin);
  const uint32_t end = subgroup_of(*last, last->begin + last->numel - 1) + 1;
  options_.pool->ParallelFor(end - begin, [&](size_t i) {
    StageSubGroup(runs_.subgroups()[begin + i], rank, gradient_area,
                  first_piece, actions, staged_mark);
  });
}

void StepScheduler::StageSubGroup(const RunTable::SubGroup& subgroup,
                                  uint32_t rank, const std::byte* gradient_area,
                                  size_t first_piece,
                                  absl::Span<const StageAction> actions,
                                  uint64_t staged_mark) {
  const RankPartition& partition = partitions_[rank];
  const size_t end_piece = first_piece + actions.size();
  for (size_t i = std::max(first_piece,
                           partition.LowerBound(subgroup.first_parameter));
       i < end_piece; ++i) {
    const Piece& piece = partition.pieces[i];
    if (piece.parameter >= subgroup.end_parameter) return;
    if (actions[i - first_piece] == StageAction::kNothing) continue;
    const uint64_t flat = options_.layout->flat_offset(piece.parameter);
    // The part of the piece within the sub-group, in elements of the parameter.
    const uint64_t begin = std::max(flat + piece.begin, subgroup.begin) - flat;
    const uint64_t end =
        std::min(flat + piece.begin + piece.numel, subgroup.end);
    if (flat + begin >= end) continue;
    StagePiece(piece, begin, end - flat, gradient_area, staged_mark);
  }
}

void StepScheduler::StagePiece(const Piece& piece, uint64_t begin, uint64_t end,
                               const std::byte* gradient_area,
                               uint64_t staged_mark) {
  const Layout& layout = *options_.layout;
  const DType dtype = layout.parameters()[piece.parameter].gradient_dtype;
  const std::byte* gradient = gradient_area + piece.gradient_offset_bytes;
  float* accumulator = options_.arrays.accumulator;
  if (accumulator != nullptr) {
    accumulator += layout.flat_offset(piece.parameter);
  }
  runs_.ForEachRun(
      piece.parameter, begin, end,
      [&](uint64_t run, uint64_t run_begin, uint64_t numel) {
        const std::byte* from =
            gradient + (run_begin - piece.begin) * SizeInBytes(dtype);
        if (accumulator == nullptr) {
          run_sums_[run] = optstate::SumOfSquares(dtype, from, numel);
          return;
        }
        AccumulateRun(run, dtype, from, accumulator + run_begin, numel,
                      staged_mark);
      });
}

void StepScheduler::AccumulateRun(uint64_t run, DType dtype,
                                  const std::byte* gradient, float* sum,
                                  uint64_t numel, uint64_t staged_mark) {
  std::atomic<uint64_t>& mark = options_.recovery.staged_marks[run];
  const uint64_t before = mark.load(std::memory_order_relaxed);
  if (before == staged_mark) return;
  if (EpochOf(before) == EpochOf(staged_mark)) {
    WorkerUndo& undo = worker_undo();
    undo.Begin(UndoKind::kAccumulate, run, staged_mark);
    Accumulate(dtype, gradient, /*first=*/false, sum, numel, &undo.slot);
    undo.End(&mark);
  } else {
    // Overwrites what counts no more; broken off, it is begun anew.
    Accumulate(dtype, gradient, /*first=*/true, sum, numel);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    mark.store(staged_mark, std::memory_order_relaxed);
  }
  // The sum's own squares, while it is in the cache: after the last micro-step
  // they are those of the whole gradient.
  run_sums_[run] = optstate::SumOfSquares(DType::kFloat32, sum, numel);
}

double StepScheduler::SumOfSquares(absl::Span<const uint8_t> updated) const {
  double sum = 0;
  for (uint32_t p = 0; p < updated.size(); ++p) {
    if (updated[p] == 0) continue;
    for (uint64_t run = runs_.first_run(p); run < runs_.first_run(p + 1);
         ++run) {
      sum += run_sums_[run];
    }
  }
  return sum;
}

void StepScheduler::Apply(const Update& update) {
  FinishRunsInFlight(update);
  options_.pool->ParallelFor(runs_.subgroups().size(), [&](size_t i) {
    ApplySubGroup(runs_.subgroups()[i], update);
  });
  if (options_.observer != nullptr) options_.observer->OnRunsDone(update.step);
  CountStep(update.updated);
}

// Broken off anywhere, it is taken up where it was: see ControlFile.
void StepScheduler::CountStep(absl::Span<const uint8_t> updated) {
  ControlFile& control = *options_.control;
  int64_t* const counts = options_.arrays.step_counts;
  uint64_t p = control.counts_begun.load(std::memory_order_relaxed);
  if (p != 0) {
    --p;
    counts[p] = control.count_before[p % 2];
  }
  for (; p < updated.size(); ++p) {
    control.count_before[p % 2] = counts[p];
    std::atomic_signal_fence(std::memory_order_seq_cst);
    control.counts_begun.store(p + 1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    counts[p] += updated[p];
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
}

void StepScheduler::ApplySubGroup(const RunTable::SubGroup& subgroup,
                                  const Update& update) {
  const Layout& layout = *options_.layout;
  // As a rule all parameters of a group have counted the same steps.
  const UpdateKernel* prepared_by = nullptr;
  int64_t prepared_count = 0;
  UpdateFactors factors;
  for (uint32_t p = subgroup.first_parameter; p < subgroup.end_parameter; ++p) {
    if (update.updated[p] == 0) continue;
    const uint64_t flat = layout.flat_offset(p);
    const uint64_t flat_begin = std::max(flat, subgroup.begin);
    const uint64_t flat_end =
        std::min(flat + NumelOf(layout.parameters()[p]), subgroup.end);
    if (flat_begin >= flat_end) continue;
    const int64_t count = options_.arrays.step_counts[p] + 1;
    if (kernels_[p] != prepared_by || count != prepared_count) {
      factors = kernels_[p]->prepare(update.groups[subgroup.group], count,
                                     update.gradient_factor);
      prepared_by = kernels_[p];
      prepared_count = count;
    }
    ApplyParameter(p, flat_begin - flat, flat_end - flat, factors, update);
  }
}

void StepScheduler::ApplyParameter(uint32_t parameter, uint64_t begin,
                                   uint64_t end, const UpdateFactors& factors,
                                   const Update& update) {
  for (const PieceTable::Entry& piece : pieces_->pieces(parameter)) {
    const uint64_t piece_begin = std::max(begin, piece.begin);
    const uint64_t piece_end = std::min(end, piece.end);
    if (piece_begin >= piece_end) continue;
    runs_.ForEachRun(
        parameter, piece_begin, piece_end,
        [&](uint64_t run, uint64_t run_begin, uint64_t numel) {
          std::atomic<uint64_t>& stamp = options_.recovery.run_stamps[run];
          if (stamp.load(std::memory_order_relaxed) == update.step) {
            return;
          }
          TileView view = ViewOf(parameter, run_begin, numel);
          if (update.speculative) {
            KeepRun(run, update.step, view,
                    options_.layout->flat_offset(parameter) + run_begin);
          }
          WorkerUndo& undo = worker_undo();
          undo.Begin(UndoKind::kUpdate, run, update.step);
          view.gradient = GradientOf(parameter, piece, run_begin, update);
          view.undo = &undo.slot;
          kernels_[parameter]->apply(factors, view);
          undo.End(&stamp);
          if (options_.observer != nullptr) {
            options_.observer->OnRunUpdated(update.step, run);
          }
        });
  }
}

const void* StepScheduler::GradientOf(uint32_t parameter,
                                      const PieceTable::Entry& piece,
                                      uint64_t begin,
                                      const Update& update) const {
  const Layout& layout = *options_.layout;
  if (options_.arrays.accumulator != nullptr) {
    return options_.arrays.accumulator + layout.flat_offset(parameter) + begin;
  }
  return update.gradient_areas[piece.rank] + piece.gradient_offset_bytes +
         (begin - piece.begin) *
             SizeInBytes(layout.parameters()[parameter].gradient_dtype);
}

TileView StepScheduler::ViewOf(uint32_t parameter, uint64_t begin,
                               uint64_t numel) const {
  const Layout& layout = *options_.layout;
  const ParameterSpec& spec = layout.parameters()[parameter];
  const uint64_t flat = layout.flat_offset(parameter) + begin;
  TileView view;
  view.parameter = options_.parameters +
                   layout.parameter_offset_bytes(parameter) +
                   begin * SizeInBytes(spec.dtype);
  view.master = options_.arrays.master + flat;
  const StateBases& bases = state_[spec.group];
  for (size_t i = 0; i < bases.size(); ++i) {
    view.state[i] = bases[i] == nullptr ? nullptr : bases[i] + flat;
  }
  view.numel = numel;
  return view;
}

absl::Span<WorkerUndo> StepScheduler::worker_undos() const {
  return {reinterpret_cast<WorkerUndo*>(options_.undo.data()),
          options_.undo.size() / sizeof(WorkerUndo)};
}

WorkerUndo& StepScheduler::worker_undo() const {
  return worker_undos()[static_cast<size_t>(WorkerPool::CurrentParticipant())];
}

void StepScheduler::CastParameters(uint32_t first_parameter) {
  const Layout& layout = *options_.layout;
  ForEachElementRange(first_parameter, [&](uint32_t p, uint64_t begin,
                                           uint64_t numel) {
    const DType dtype = layout.parameters()[p].dtype;
    CastFromFloat(dtype, options_.arrays.master + layout.flat_offset(p) + begin,
                  options_.parameters + layout.parameter_offset_bytes(p) +
                      begin * SizeInBytes(dtype),
                  numel);
  });
}

void StepScheduler::ClearState(uint32_t first_parameter) {
  const Layout& layout = *options_.layout;
  ForEachElementRange(
      first_parameter, [&](uint32_t p, uint64_t begin, uint64_t numel) {
        const uint64_t flat = layout.flat_offset(p) + begin;
        std::memset(options_.arrays.master + flat, 0, numel * sizeof(float));
        // Only the arrays of this group's kernel: elsewhere there is no memory.
        for (float* base : state_[layout.parameters()[p].group]) {
          if (base != nullptr)
            std::memset(base + flat, 0, numel * sizeof(float));
        }
      });
  for (uint32_t p = first_parameter; p < layout.parameters().size(); ++p) {
    options_.arrays.step_counts[p] = 0;
  }
}

}  // namespace optstate
