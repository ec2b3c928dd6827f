#include "server/scheduler/step_scheduler.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cast.h"
#include "kernels/master_format.h"
#include "kernels/reduce.h"
#include "proto/types/array_format.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/numa_memory.h"

namespace optstate {
namespace {

uint64_t NumelOf(const ParameterSpec& spec) {
  return static_cast<uint64_t>(spec.numel);
}

MasterFormat MasterOf(const Layout& layout, const ParameterSpec& spec) {
  return spec.dtype == DType::kFloat32 ? MasterFormat::kParameter
                                       : layout.master_format();
}

absl::StatusOr<const UpdateKernel*> KernelOf(const Layout& layout,
                                             const ParameterSpec& spec,
                                             Accumulation accumulation) {
  UpdateKernelKey key;
  key.optimizer = layout.optimizer();
  key.options = layout.groups()[spec.group].options;
  key.state = layout.state_format();
  key.master = MasterOf(layout, spec);
  key.gradient = accumulation == AccumulateDType::kFloat32
                     ? DType::kFloat32
                     : spec.gradient_dtype;
  key.parameter = spec.dtype;
  return FindUpdateKernel(key);
}

}  // namespace

StepScheduler::StepScheduler(const Options& options)
    : options_(options),
      runs_(options.layout, options.subgroup_elements),
      state_(options.layout->groups().size(), StateBases{}),
      run_sums_(runs_.run_count(), 0),
      run_norms_(runs_.run_count(), 0) {}

absl::Status StepScheduler::CheckKernels(const Layout& layout,
                                         Accumulation accumulation) {
  const WholeKernel* const whole = FindWholeKernel(layout.optimizer());
  if (whole != nullptr) return CheckWholeKernel(layout, *whole);
  for (const ParameterSpec& spec : layout.parameters()) {
    OPTSTATE_RETURN_IF_ERROR(
        Annotate(KernelOf(layout, spec, accumulation).status(), spec.name));
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
  MakeColumns();
  if (options_.arrays.gradient_accumulator != nullptr) {
    sum_offsets_ = GradientSumOffsets(*options_.layout);
  }
  for (uint32_t group = 0; group < state_.size(); ++group) {
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!options_.layout->has_state_array(k, group)) continue;
      state_[group].state[k] = options_.arrays.state[k];
      state_[group].scale[k] = options_.arrays.scale[k];
    }
  }
  whole_ = FindWholeKernel(options_.layout->optimizer());
  if (whole_ != nullptr) return MakeWorkspace();
  Accumulation accumulation;
  if (options_.arrays.accumulator != nullptr) {
    accumulation = AccumulateDType::kFloat32;
  }
  kernels_.reserve(options_.layout->parameters().size());
  for (const ParameterSpec& spec : options_.layout->parameters()) {
    OPTSTATE_ASSIGN_OR_RETURN(const UpdateKernel* kernel,
                              KernelOf(*options_.layout, spec, accumulation));
    kernels_.push_back(kernel);
  }
  return absl::OkStatus();
}

void StepScheduler::MakeColumns() {
  const StateArrays& arrays = options_.arrays;
  // Behind the masters.
  uint64_t kept_at = SpeculationEntryBytes(*options_.layout) +
                     options_.layout->flat_elements() * sizeof(float);
  const auto add = [&](std::byte* base, uint64_t block_bytes,
                       uint64_t element_bytes, int state) {
    if (base == nullptr) return;
    columns_.push_back({base, block_bytes, element_bytes, state, kept_at});
    kept_at += options_.layout->flat_elements() / kQuantizedBlockElements *
               block_bytes;
  };
  for (int k = 0; k < kStateArraysMax; ++k) {
    const uint64_t element_bytes =
        SizeInBytes(ArrayFormat(*options_.layout, k));
    add(arrays.state[k], kQuantizedBlockElements * element_bytes, element_bytes,
        k);
    add(reinterpret_cast<std::byte*>(arrays.scale[k]), sizeof(float), 0, k);
  }
}

absl::Status StepScheduler::MoveToNodes(const WorkerPlacement& placement) {
  if (!placement.several_nodes()) return absl::OkStatus();
  const auto subgroups = runs_.subgroups();
  absl::Status status;
  for (const NodeShare& share : NodeShares(placement, subgroups.size())) {
    if (share.begin == share.end) continue;
    const uint64_t begin = subgroups[share.begin].begin;
    const uint64_t end = subgroups[share.end - 1].end;
    status.Update(MoveMasters(begin, end, share.node));
    for (const Column& column : columns_) {
      if (MayHaveHoles(column)) continue;
      const uint64_t first =
          begin / kQuantizedBlockElements * column.block_bytes;
      status.Update(MoveToNode(
          {column.base + first,
           (end - begin) / kQuantizedBlockElements * column.block_bytes},
          share.node));
    }
    if (!accumulates()) continue;
    const auto sums_at = [&](uint32_t p, uint64_t flat) {
      const uint64_t parameter = options_.layout->flat_offset(p);
      const uint64_t element = flat - std::min(flat, parameter);
      return SumsOf(
          p, std::min(element, NumelOf(options_.layout->parameters()[p])));
    };
    std::byte* const sums =
        sums_at(subgroups[share.begin].first_parameter, begin);
    std::byte* const sums_end =
        sums_at(subgroups[share.end - 1].end_parameter - 1, end);
    status.Update(
        MoveToNode({sums, static_cast<size_t>(sums_end - sums)}, share.node));
  }
  return status;
}

// Masters and parameters of flat elements [begin, end): both lie in the order
// of the flat space, the former with holes where a parameter is its own master.
absl::Status StepScheduler::MoveMasters(uint64_t begin, uint64_t end,
                                        int node) {
  const Layout& layout = *options_.layout;
  absl::Status status;
  absl::Span<std::byte> masters, parameters;
  const auto move = [&](absl::Span<std::byte>* piece) {
    if (!piece->empty()) status.Update(MoveToNode(*piece, node));
    *piece = {};
  };
  const auto extend = [](absl::Span<std::byte>* piece, void* data,
                         uint64_t bytes) {
    auto* const at = static_cast<std::byte*>(data);
    std::byte* const start = piece->empty() ? at : piece->data();
    *piece = {start, static_cast<size_t>(at + bytes - start)};
  };
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const ParameterSpec& spec = layout.parameters()[p];
    const uint64_t flat = layout.flat_offset(p);
    const uint64_t from = std::max(begin, flat);
    const uint64_t to = std::min(end, flat + NumelOf(spec));
    if (from >= to) continue;
    const TileView view = ViewOf(p, from - flat, to - from);
    extend(&parameters, view.parameter, view.numel * SizeInBytes(spec.dtype));
    const uint64_t beside = SizeInBytes(layout.master_format(p));
    if (beside == 0) {
      move(&masters);
    } else {
      extend(&masters, view.master, view.numel * beside);
    }
  }
  move(&masters);
  move(&parameters);
  return status;
}

// Whether the arrays have fewer elements than their parameters, at their
// beginning.
bool StepScheduler::HasPrefixes() const {
  return options_.layout->optimizer() == OptimizerKind::kAdafactor;
}

// An array that an option brings only has memory for the groups with it.
bool StepScheduler::MayHaveHoles(const Column& column) const {
  if (HasPrefixes()) return true;
  const auto index = static_cast<size_t>(column.state);
  return options_.layout->optimizer_info().state_arrays[index].option != 0;
}

void StepScheduler::SetPartitions(absl::Span<const RankPartition> partitions,
                                  bool replicated) {
  partitions_ = partitions;
  replicated_ = replicated;
  const auto parameters =
      static_cast<uint32_t>(options_.layout->parameters().size());
  pieces_.emplace(parameters, partitions);
  update_bytes_.resize(parameters);
  for (uint32_t p = 0; p < parameters; ++p) update_bytes_[p] = UpdateBytes(p);
}

void StepScheduler::Stage(const Staging& staging) {
  if (staging.actions.empty()) return;
  const auto& pieces = partitions_[staging.rank].pieces;
  const auto subgroup_of = [&](const Piece& piece, uint64_t element) {
    const uint32_t p = piece.parameter;
    return runs_.SubGroupOf(options_.layout->parameters()[p].group,
                            options_.layout->flat_offset(p) + element);
  };
  // Pieces without elements at either end have nothing to schedule.
  const Piece* first = &pieces[staging.first_piece];
  const Piece* last = first + staging.actions.size() - 1;
  while (first <= last && first->numel == 0) ++first;
  while (last > first && last->numel == 0) --last;
  if (first > last) return;
  const uint32_t begin = subgroup_of(*first, first->begin);
  const uint32_t end = subgroup_of(*last, last->begin + last->numel - 1) + 1;
  options_.pool->ParallelFor(
      {begin, end, runs_.subgroups().size()},
      [&](size_t i) { StageSubGroup(runs_.subgroups()[i], staging); });
}

void StepScheduler::StageSubGroup(const RunTable::SubGroup& subgroup,
                                  const Staging& staging) {
  const RankPartition& partition = partitions_[staging.rank];
  const size_t end_piece = staging.first_piece + staging.actions.size();
  for (size_t i = std::max(staging.first_piece,
                           partition.LowerBound(subgroup.first_parameter));
       i < end_piece; ++i) {
    const Piece& piece = partition.pieces[i];
    if (piece.parameter >= subgroup.end_parameter) return;
    if (staging.actions[i - staging.first_piece] == StageAction::kNothing) {
      continue;
    }
    const uint64_t flat = options_.layout->flat_offset(piece.parameter);
    // The part of the piece within the sub-group, in elements of the parameter.
    const uint64_t begin = std::max(flat + piece.begin, subgroup.begin) - flat;
    const uint64_t end =
        std::min(flat + piece.begin + piece.numel, subgroup.end);
    if (flat + begin >= end) continue;
    StagePiece(staging, piece, begin, end - flat);
  }
}

void StepScheduler::StagePiece(const Staging& staging, const Piece& piece,
                               uint64_t begin, uint64_t end) {
  const uint32_t p = piece.parameter;
  const DType dtype = options_.layout->parameters()[p].gradient_dtype;
  const PieceTable::Entry entry = {staging.rank, piece.begin,
                                   piece.begin + piece.numel,
                                   piece.gradient_offset_bytes};
  GradientSources sources;
  runs_.ForEachRun(
      p, begin, end, [&](uint64_t run, uint64_t run_begin, uint64_t numel) {
        const absl::Span<const void* const> from =
            PushedGradients(p, entry, run_begin, staging.gradient_areas,
                            staging.has_pushed, &sources);
        if (accumulates()) {
          AccumulateRun(run, p, run_begin, numel, from, staging.staged_mark);
        } else {
          run_sums_[run] = optstate::SumOfSquares(dtype, from, numel);
        }
      });
}

DType StepScheduler::SumDTypeOf(uint32_t parameter) const {
  return options_.arrays.accumulator != nullptr
             ? DType::kFloat32
             : options_.layout->parameters()[parameter].gradient_dtype;
}

std::byte* StepScheduler::SumsOf(uint32_t parameter, uint64_t begin) const {
  if (options_.arrays.accumulator != nullptr) {
    return reinterpret_cast<std::byte*>(
        options_.arrays.accumulator + options_.layout->flat_offset(parameter) +
        begin);
  }
  return options_.arrays.gradient_accumulator + sum_offsets_[parameter] +
         begin * SizeInBytes(SumDTypeOf(parameter));
}

void StepScheduler::AccumulateRun(uint64_t run, uint32_t parameter,
                                  uint64_t begin, uint64_t numel,
                                  absl::Span<const void* const> gradients,
                                  uint64_t staged_mark) {
  const DType dtype = options_.layout->parameters()[parameter].gradient_dtype;
  const DType sum_dtype = SumDTypeOf(parameter);
  std::byte* const sum = SumsOf(parameter, begin);
  std::atomic<uint64_t>& mark = options_.recovery.staged_marks[run];
  const uint64_t before = mark.load(std::memory_order_relaxed);
  if (before == staged_mark) return;
  if (EpochOf(before) == EpochOf(staged_mark)) {
    WorkerUndo& undo = worker_undo();
    undo.Begin(UndoKind::kAccumulate, run, staged_mark);
    Accumulate(dtype, gradients, /*first=*/false, sum_dtype, sum, numel,
               &undo.slot);
    undo.End(&mark);
  } else {
    // Overwrites what counts no more; broken off, it is begun anew.
    Accumulate(dtype, gradients, /*first=*/true, sum_dtype, sum, numel);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    mark.store(staged_mark, std::memory_order_relaxed);
  }
  // The sum's own squares, while it is in the cache: after the last micro-step
  // they are those of the whole gradient.
  run_sums_[run] = optstate::SumOfSquares(sum_dtype, sum, numel);
}

double StepScheduler::SumOfSquares(absl::Span<const uint8_t> updated,
                                   absl::Span<double> by_group) const {
  std::fill(by_group.begin(), by_group.end(), 0);
  double sum = 0;
  for (uint32_t p = 0; p < updated.size(); ++p) {
    if (updated[p] == 0) continue;
    double& of_group = by_group[options_.layout->parameters()[p].group];
    for (uint64_t run = runs_.first_run(p); run < runs_.first_run(p + 1);
         ++run) {
      sum += run_sums_[run];
      of_group += run_sums_[run];
    }
  }
  return sum;
}

void StepScheduler::NormsByParameter(absl::Span<const uint8_t> updated,
                                     absl::Span<double> norms) const {
  for (uint32_t p = 0; p < updated.size(); ++p) {
    double sum = 0;
    const uint64_t end =
        updated[p] == 0 ? runs_.first_run(p) : runs_.first_run(p + 1);
    for (uint64_t run = runs_.first_run(p); run < end; ++run) {
      sum += run_sums_[run];
    }
    norms[p] = std::sqrt(sum);
  }
}

double StepScheduler::Norm(double type, const Update& update) {
  const absl::Span<const uint8_t> updated = update.updated;
  const bool largest = type != 1;
  options_.pool->ParallelFor(updated.size(), [&](size_t i) {
    const auto p = static_cast<uint32_t>(i);
    if (updated[p] == 0) return;
    const DType dtype = SumDTypeOf(p);
    GradientSources sources;
    for (const PieceTable::Entry& piece : OwnersOf(p)) {
      runs_.ForEachRun(
          p, piece.begin, piece.end,
          [&](uint64_t run, uint64_t begin, uint64_t numel) {
            const auto from = GradientsOf(p, piece, begin, update, &sources);
            run_norms_[run] =
                largest
                    ? Reduce(Reduction::kLargestAbsolute, dtype, from, numel)
                    : Reduce(Reduction::kSumOfAbsolutes, dtype, from, numel);
          });
    }
  });
  double norm = 0;
  for (uint32_t p = 0; p < updated.size(); ++p) {
    if (updated[p] == 0) continue;
    for (uint64_t run = runs_.first_run(p); run < runs_.first_run(p + 1);
         ++run) {
      norm = largest ? std::max(norm, run_norms_[run]) : norm + run_norms_[run];
    }
  }
  return norm;
}

void StepScheduler::Apply(const Update& update) {
  FinishRunsInFlight(update);
  if (whole_ != nullptr) {
    ApplyWholes(update);
  } else {
    options_.pool->ParallelFor(runs_.subgroups().size(), [&](size_t i) {
      ApplySubGroup(runs_.subgroups()[i], update);
    });
  }
  if (options_.observer != nullptr) options_.observer->OnRunsDone(update.step);
  CountStep(update);
}

uint64_t StepScheduler::UpdateBytes(absl::Span<const uint8_t> updated) const {
  uint64_t bytes = 0;
  for (uint32_t p = 0; p < updated.size(); ++p) {
    if (updated[p] != 0) bytes += update_bytes_[p];
  }
  return bytes;
}

uint64_t StepScheduler::UpdateBytes(uint32_t parameter) const {
  const Layout& layout = *options_.layout;
  const ParameterSpec& spec = layout.parameters()[parameter];
  const uint64_t numel = NumelOf(spec);
  const uint64_t gradients =
      replicated_ && !accumulates() ? partitions_.size() : 1;
  uint64_t bytes = numel * SizeInBytes(SumDTypeOf(parameter)) * gradients;
  ForEachMasterPart(parameter, 0, numel,
                    [&](const std::byte* /*data*/, uint64_t part_bytes) {
                      bytes += 2 * part_bytes;
                    });
  if (layout.master_format(parameter) == MasterFormat::kFloat32) {
    bytes += numel * SizeInBytes(spec.dtype);
  }
  if (HasPrefixes()) return bytes;
  ForEachColumn(spec.group, layout.flat_offset(parameter), numel,
                [&](const Column& /*column*/, uint64_t /*first*/,
                    uint64_t column_bytes) { bytes += 2 * column_bytes; });
  return bytes;
}

// Broken off anywhere, it is taken up where it was: see ControlFile.
void StepScheduler::CountStep(const Update& update) {
  ControlFile& control = *options_.control;
  int64_t* const counts = options_.arrays.step_counts;
  double* const scalars = options_.arrays.scalars;
  uint64_t p = control.counts_begun.load(std::memory_order_relaxed);
  if (p != 0) {
    --p;
    counts[p] = control.count_before[p % 2];
    if (scalars != nullptr) scalars[p] = control.scalar_before[p % 2];
  }
  for (; p < update.updated.size(); ++p) {
    control.count_before[p % 2] = counts[p];
    if (scalars != nullptr) control.scalar_before[p % 2] = scalars[p];
    std::atomic_signal_fence(std::memory_order_seq_cst);
    control.counts_begun.store(p + 1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (update.updated[p] == 0) continue;
    if (scalars != nullptr) scalars[p] = InputOf(p, update).scalar;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    ++counts[p];
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
}

UpdateInput StepScheduler::InputOf(uint32_t parameter,
                                   const Update& update) const {
  const GroupUpdate& group =
      update.groups[options_.layout->parameters()[parameter].group];
  UpdateInput input;
  input.hyperparams = group.hyperparams;
  input.step_count = options_.arrays.step_counts[parameter] + 1;
  input.gradient_factor = group.gradient_factor;
  input.gradient_limit = update.gradient_limit;
  input.step = update.step;
  if (whole_ != nullptr) return input;
  const UpdateKernel& kernel = *kernels_[parameter];
  if (kernel.advance != nullptr) {
    const double before = input.step_count == 1
                              ? options_.layout->optimizer_info().scalar_initial
                              : options_.arrays.scalars[parameter];
    input.scalar = kernel.advance(input.hyperparams, input.step_count, before);
  }
  return input;
}

void StepScheduler::ApplySubGroup(const RunTable::SubGroup& subgroup,
                                  const Update& update) {
  const Layout& layout = *options_.layout;
  // As a rule all parameters of a group have counted the same steps.
  const UpdateKernel* prepared_by = nullptr;
  UpdateInput prepared;
  UpdateFactors factors;
  for (uint32_t p = subgroup.first_parameter; p < subgroup.end_parameter; ++p) {
    if (update.updated[p] == 0) continue;
    const uint64_t flat = layout.flat_offset(p);
    const uint64_t flat_begin = std::max(flat, subgroup.begin);
    const uint64_t flat_end =
        std::min(flat + NumelOf(layout.parameters()[p]), subgroup.end);
    if (flat_begin >= flat_end) continue;
    const UpdateInput input = InputOf(p, update);
    if (kernels_[p] != prepared_by || input.step_count != prepared.step_count ||
        input.scalar != prepared.scalar) {
      factors = kernels_[p]->prepare(input);
      prepared_by = kernels_[p];
      prepared = input;
    }
    ApplyParameter(p, flat_begin - flat, flat_end - flat, factors, update);
  }
}

void StepScheduler::ApplyParameter(uint32_t parameter, uint64_t begin,
                                   uint64_t end, const UpdateFactors& factors,
                                   const Update& update) {
  GradientSources sources;
  for (const PieceTable::Entry& piece : OwnersOf(parameter)) {
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
            KeepRun(run, update.step, parameter, run_begin, numel);
          }
          WorkerUndo& undo = worker_undo();
          undo.Begin(UndoKind::kUpdate, run, update.step);
          view.gradients =
              GradientsOf(parameter, piece, run_begin, update, &sources);
          view.undo = &undo.slot;
          kernels_[parameter]->apply(factors, view);
          undo.End(&stamp);
          if (options_.observer != nullptr) {
            options_.observer->OnRunUpdated(update.step, run);
          }
        });
  }
}

// Replicated, the first rank stands for all.
absl::Span<const PieceTable::Entry> StepScheduler::OwnersOf(
    uint32_t parameter) const {
  return pieces_->pieces(parameter).first(
      replicated_ ? 1 : pieces_->pieces(parameter).size());
}

absl::Span<const void* const> StepScheduler::PushedGradients(
    uint32_t parameter, const PieceTable::Entry& piece, uint64_t begin,
    absl::Span<const std::byte* const> gradient_areas,
    absl::FunctionRef<bool(uint32_t rank, uint32_t parameter)> has_pushed,
    GradientSources* sources) const {
  const DType dtype = options_.layout->parameters()[parameter].gradient_dtype;
  const uint64_t offset_bytes =
      piece.gradient_offset_bytes + (begin - piece.begin) * SizeInBytes(dtype);
  if (!replicated_) {
    (*sources)[0] = gradient_areas[piece.rank] + offset_bytes;
    return absl::MakeConstSpan(*sources).first(1);
  }
  size_t count = 0;
  for (uint32_t rank = 0; rank < gradient_areas.size(); ++rank) {
    if (!has_pushed(rank, parameter)) continue;
    (*sources)[count++] = gradient_areas[rank] + offset_bytes;
  }
  return absl::MakeConstSpan(*sources).first(count);
}

absl::Span<const void* const> StepScheduler::GradientsOf(
    uint32_t parameter, const PieceTable::Entry& piece, uint64_t begin,
    const Update& update, GradientSources* sources) const {
  if (!accumulates()) {
    return PushedGradients(
        parameter, piece, begin, update.gradient_areas,
        [&](uint32_t rank, uint32_t p) { return update.HasPushed(rank, p); },
        sources);
  }
  (*sources)[0] = SumsOf(parameter, begin);
  return absl::MakeConstSpan(*sources).first(1);
}

TileView StepScheduler::ViewOf(uint32_t parameter, uint64_t begin,
                               uint64_t numel) const {
  const Layout& layout = *options_.layout;
  const ParameterSpec& spec = layout.parameters()[parameter];
  const uint64_t flat = layout.flat_offset(parameter) + begin;
  TileView view;
  view.parameter = options_.arrays.parameters +
                   layout.parameter_offset_bytes(parameter) +
                   begin * SizeInBytes(spec.dtype);
  const MasterFormat master = layout.master_format(parameter);
  view.master = master == MasterFormat::kParameter
                    ? view.parameter
                    : options_.arrays.master + flat * SizeInBytes(master);
  const StateBases& bases = state_[spec.group];
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (bases.state[k] == nullptr) continue;
    view.state[k] = bases.state[k] + flat * SizeInBytes(ArrayFormat(layout, k));
    if (bases.scale[k] == nullptr) continue;
    view.scale[k] = bases.scale[k] + flat / kQuantizedBlockElements;
  }
  view.numel = numel;
  view.flat_begin = flat;
  return view;
}

absl::Span<WorkerUndo> StepScheduler::worker_undos() const {
  return {reinterpret_cast<WorkerUndo*>(options_.undo.data()),
          options_.undo.size() / sizeof(WorkerUndo)};
}

WorkerUndo& StepScheduler::worker_undo() const {
  return worker_undos()[static_cast<size_t>(WorkerPool::CurrentParticipant())];
}

void StepScheduler::ReadMaster(uint32_t parameter, uint64_t begin,
                               uint64_t numel, float* out) const {
  const TileView view = ViewOf(parameter, begin, numel);
  MasterToFloat(options_.layout->master_format(parameter), view.parameter,
                view.master, out, numel);
}

void StepScheduler::WriteMaster(uint32_t parameter, uint64_t begin,
                                uint64_t numel, const float* in) {
  const TileView view = ViewOf(parameter, begin, numel);
  MasterFromFloat(options_.layout->master_format(parameter),
                  options_.layout->parameters()[parameter].dtype, in,
                  view.parameter, view.master, numel);
}

void StepScheduler::ClearState(uint32_t first_parameter) {
  const Layout& layout = *options_.layout;
  ForEachElementRange(
      first_parameter, [&](uint32_t p, uint64_t begin, uint64_t numel) {
        ForEachMasterPart(p, begin, numel, [](std::byte* data, uint64_t bytes) {
          std::memset(data, 0, bytes);
        });
        ForEachColumn(
            layout.parameters()[p].group, layout.flat_offset(p) + begin, numel,
            [&](const Column& column, uint64_t first, uint64_t bytes) {
              if (HasPrefixes()) return;
              std::memset(column.base + first, 0, bytes);
            });
      });
  for (const Column& column : columns_) {
    if (!HasPrefixes()) continue;
    for (uint32_t p = first_parameter; p < layout.parameters().size(); ++p) {
      const ByteRange range =
          RangeOf(column, layout.flat_offset(p),
                  StateElements(layout.optimizer_info(), column.state,
                                layout.parameters()[p].shape));
      std::memset(column.base + range.begin, 0, range.end - range.begin);
    }
  }
  for (uint32_t p = first_parameter; p < layout.parameters().size(); ++p) {
    options_.arrays.step_counts[p] = 0;
    if (options_.arrays.scalars != nullptr) options_.arrays.scalars[p] = 0;
  }
}

}  // namespace optstate
