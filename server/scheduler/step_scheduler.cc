#include "server/scheduler/step_scheduler.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cast.h"
#include "kernels/master_format.h"
#include "kernels/reduce.h"
#include "proto/types/runs.h"
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
      store_(*options.store),
      layout_(store_.layout()),
      grains_(&layout_, options.grain_elements, SubGroupTable::Cut::kTiles),
      run_sums_(layout_.run_count(), 0),
      run_norms_(layout_.run_count(), 0),
      wanted_(store_.is_resident() ? 0 : store_.sub_groups().size()) {}

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
  whole_ = FindWholeKernel(layout_.optimizer());
  if (whole_ != nullptr) return MakeWorkspace();
  Accumulation accumulation;
  if (store_.accumulates_float()) accumulation = AccumulateDType::kFloat32;
  kernels_.reserve(layout_.parameters().size());
  for (const ParameterSpec& spec : layout_.parameters()) {
    OPTSTATE_ASSIGN_OR_RETURN(const UpdateKernel* kernel,
                              KernelOf(layout_, spec, accumulation));
    kernels_.push_back(kernel);
  }
  return absl::OkStatus();
}

absl::Status StepScheduler::MoveToNodes(const WorkerPlacement& placement) {
  absl::Status status;
  if (!placement.several_nodes() || !store_.is_resident()) return status;
  for (const NodeShare& share :
       NodeShares(placement, store_.sub_groups().size())) {
    status.Update(MoveShare(share));
  }
  return status;
}

// Moves the arrays of consecutive records together: they are adjacent as a
// rule.
absl::Status StepScheduler::MoveShare(const NodeShare& share) {
  constexpr int kParameterPart = kRecordPartCount;
  constexpr int kSumPart = kParameterPart + 1;
  constexpr std::ptrdiff_t kGapBytesMax = 64 << 10;
  absl::Status status;
  std::array<absl::Span<std::byte>, kSumPart + 1> open;
  const auto move = [&](absl::Span<std::byte>* span) {
    if (!span->empty()) status.Update(MoveToNode(*span, share.node));
    *span = {};
  };
  const auto add = [&](int part, absl::Span<std::byte> span) {
    if (span.empty()) return;
    absl::Span<std::byte>& before = open[static_cast<size_t>(part)];
    const std::ptrdiff_t gap =
        before.empty() ? -1 : span.data() - (before.data() + before.size());
    if (gap < 0 || gap > kGapBytesMax) {
      move(&before);
      before = span;
    } else {
      before = {before.data(),
                static_cast<size_t>(span.data() + span.size() - before.data())};
    }
  };
  for (size_t i = share.begin; i < share.end; ++i) {
    const auto pin = store_.PinSubGroup(i, StateStore::Access::kWrite);
    OPTSTATE_RETURN_IF_ERROR(pin.status());
    const RecordView& record = pin->record();
    for (int part = kStatePart0; part < kRecordPartCount; ++part) {
      if (!MayHaveHoles(part)) add(part, record.part(part));
    }
    const SubGroup& range = record.sub_group();
    for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
      const ParameterSpec& spec = layout_.parameters()[p];
      const uint64_t flat = layout_.flat_offset(p);
      const uint64_t begin = std::max(flat, range.begin);
      const uint64_t end = std::min(flat + NumelOf(spec), range.end);
      if (begin >= end) continue;
      const uint64_t numel = end - begin;
      add(kParameterPart,
          {record.parameter(p, begin - flat), numel * SizeInBytes(spec.dtype)});
      const uint64_t beside = SizeInBytes(layout_.master_format(p));
      if (beside != 0) {
        add(kMasterPart, {record.master(p, begin - flat), numel * beside});
      }
      if (!accumulates()) continue;
      add(kSumPart,
          {store_.sums(p, begin - flat), numel * SizeInBytes(SumDTypeOf(p))});
    }
  }
  for (absl::Span<std::byte>& span : open) move(&span);
  return status;
}

bool StepScheduler::HasPrefixes() const {
  return layout_.optimizer_info().has_prefixes();
}

// An array that belongs to an option has memory only for groups with the
// option.
bool StepScheduler::MayHaveHoles(int part) const {
  if (HasPrefixes()) return true;
  const auto index =
      static_cast<size_t>((part - kStatePart0) % kStateArraysMax);
  return layout_.optimizer_info().state_arrays[index].option != 0;
}

void StepScheduler::SetPartitions(absl::Span<const RankPartition> partitions,
                                  bool replicated) {
  partitions_ = partitions;
  replicated_ = replicated;
  const auto parameters = static_cast<uint32_t>(layout_.parameters().size());
  pieces_.emplace(parameters, partitions);
  update_bytes_.resize(parameters);
  for (uint32_t p = 0; p < parameters; ++p) update_bytes_[p] = UpdateBytes(p);
}

void StepScheduler::Stage(const Staging& staging) {
  if (staging.actions.empty()) return;
  const auto& pieces = partitions_[staging.rank].pieces;
  const auto grain_of = [&](const Piece& piece, uint64_t element) {
    return grains_.IndexOf(piece.parameter, element);
  };
  // Pieces without elements at either end have nothing to schedule.
  const Piece* first = &pieces[staging.first_piece];
  const Piece* last = first + staging.actions.size() - 1;
  while (first <= last && first->numel == 0) ++first;
  while (last > first && last->numel == 0) --last;
  if (first > last) return;
  const uint32_t begin = grain_of(*first, first->begin);
  const uint32_t end = grain_of(*last, last->begin + last->numel - 1) + 1;
  options_.pool->ParallelFor({begin, end, grains_.size()}, [&](size_t i) {
    StageGrain(grains_[i], staging);
  });
}

void StepScheduler::StageGrain(const SubGroup& grain, const Staging& staging) {
  const RankPartition& partition = partitions_[staging.rank];
  const size_t end_piece = staging.first_piece + staging.actions.size();
  for (size_t i = std::max(staging.first_piece,
                           partition.LowerBound(grain.first_parameter));
       i < end_piece; ++i) {
    const Piece& piece = partition.pieces[i];
    if (piece.parameter >= grain.end_parameter) return;
    if (staging.actions[i - staging.first_piece] == StageAction::kNothing) {
      continue;
    }
    const uint64_t flat = layout_.flat_offset(piece.parameter);
    // The part of the piece within the sub-group, in elements of the parameter.
    const uint64_t begin = std::max(flat + piece.begin, grain.begin) - flat;
    const uint64_t end = std::min(flat + piece.begin + piece.numel, grain.end);
    if (flat + begin >= end) continue;
    StagePiece(staging, piece, begin, end - flat);
  }
}

void StepScheduler::StagePiece(const Staging& staging, const Piece& piece,
                               uint64_t begin, uint64_t end) {
  const uint32_t p = piece.parameter;
  const DType dtype = layout_.parameters()[p].gradient_dtype;
  const PieceTable::Entry entry = {staging.rank, piece.begin,
                                   piece.begin + piece.numel,
                                   piece.gradient_offset_bytes};
  GradientSources sources;
  ForEachRun(layout_, p, begin, end,
             [&](uint64_t run, uint64_t run_begin, uint64_t numel) {
               const absl::Span<const void* const> from =
                   PushedGradients(p, entry, run_begin, staging.gradient_areas,
                                   staging.has_pushed, &sources);
               if (accumulates()) {
                 AccumulateRun(run, p, run_begin, numel, from,
                               staging.staged_mark);
               } else {
                 run_sums_[run] = optstate::SumOfSquares(dtype, from, numel);
               }
             });
}

DType StepScheduler::SumDTypeOf(uint32_t parameter) const {
  return store_.accumulates_float()
             ? DType::kFloat32
             : layout_.parameters()[parameter].gradient_dtype;
}

void StepScheduler::AccumulateRun(uint64_t run, uint32_t parameter,
                                  uint64_t begin, uint64_t numel,
                                  absl::Span<const void* const> gradients,
                                  uint64_t staged_mark) {
  const DType dtype = layout_.parameters()[parameter].gradient_dtype;
  const DType sum_dtype = SumDTypeOf(parameter);
  std::byte* const sum = store_.sums(parameter, begin);
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
    // This overwrites values that no longer count; if interrupted, it is
    // repeated.
    Accumulate(dtype, gradients, /*first=*/true, sum_dtype, sum, numel);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    mark.store(staged_mark, std::memory_order_relaxed);
  }
  // Squares the sum while it is in the cache: after the last micro-step these
  // are the squares of the whole gradient.
  run_sums_[run] = optstate::SumOfSquares(sum_dtype, sum, numel);
}

double StepScheduler::SumOfRuns(absl::Span<const double> by_run,
                                uint32_t parameter) const {
  double sum = 0;
  for (uint64_t run = layout_.first_run(parameter);
       run < layout_.first_run(parameter + 1); ++run) {
    sum += by_run[run];
  }
  return sum;
}

double StepScheduler::SumOfSquares(absl::Span<const uint8_t> updated,
                                   absl::Span<double> by_group) const {
  std::fill(by_group.begin(), by_group.end(), 0);
  double sum = 0;
  for (uint32_t p = 0; p < updated.size(); ++p) {
    if (updated[p] == 0) continue;
    const double of_parameter = SumOfRuns(run_sums_, p);
    sum += of_parameter;
    by_group[layout_.parameters()[p].group] += of_parameter;
  }
  return sum;
}

void StepScheduler::NormsByParameter(absl::Span<const uint8_t> updated,
                                     absl::Span<double> norms) const {
  for (uint32_t p = 0; p < updated.size(); ++p) {
    norms[p] = updated[p] == 0 ? 0 : std::sqrt(SumOfRuns(run_sums_, p));
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
      ForEachRun(
          layout_, p, piece.begin, piece.end,
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
    if (!largest) {
      norm += SumOfRuns(run_norms_, p);
      continue;
    }
    for (uint64_t run = layout_.first_run(p); run < layout_.first_run(p + 1);
         ++run) {
      norm = std::max(norm, run_norms_[run]);
    }
  }
  return norm;
}

absl::Status StepScheduler::Apply(const Update& update) {
  OPTSTATE_RETURN_IF_ERROR(FinishRunsInFlight(update));
  OPTSTATE_RETURN_IF_ERROR(MakePass(update));
  if (options_.observer != nullptr) options_.observer->OnRunsDone(update.step);
  CountStep(update);
  return absl::OkStatus();
}

absl::Status StepScheduler::MakePass(const Update& update) {
  if (!store_.is_resident()) FindWanted(update);
  OPTSTATE_ASSIGN_OR_RETURN(const size_t positions, store_.BeginPass(wanted_));
  FirstError error;
  // Each worker has positions of its own, for the sake of the memory on its
  // node. Records that are read one after the other are taken in that order.
  std::atomic<size_t> next{0};
  const bool in_order = !store_.is_resident();
  options_.pool->ParallelFor(positions, [&](size_t i) {
    if (error.failed()) return;
    const auto pin = store_.PinOfPass(
        in_order ? next.fetch_add(1, std::memory_order_relaxed) : i);
    if (!pin.ok()) return error.Note(pin.status());
    if (whole_ != nullptr) {
      ApplyWholesOf(pin->record(), update);
    } else {
      ApplyRecord(pin->record(), update);
    }
  });
  return error.status();
}

// Finds the sub-groups that have something to update, so that no other is read
// from where it is swapped to.
void StepScheduler::FindWanted(const Update& update) {
  for (size_t i = 0; i < wanted_.size(); ++i) {
    wanted_[i] = IsWanted(store_.sub_groups()[i], update) ? 1 : 0;
  }
}

bool StepScheduler::IsWanted(const SubGroup& sub_group,
                             const Update& update) const {
  for (uint32_t p = sub_group.first_parameter; p < sub_group.end_parameter;
       ++p) {
    if (update.updated[p] == 0) continue;
    const uint64_t flat = layout_.flat_offset(p);
    const uint64_t begin = std::max(flat, sub_group.begin);
    const uint64_t end =
        std::min(flat + NumelOf(layout_.parameters()[p]), sub_group.end);
    if (begin >= end) continue;
    bool wanted = false;
    ForEachRun(layout_, p, begin - flat, end - flat,
               [&](uint64_t run, uint64_t /*begin*/, uint64_t /*numel*/) {
                 wanted |= options_.recovery.run_stamps[run].load(
                               std::memory_order_relaxed) != update.step;
               });
    if (wanted) return true;
  }
  return false;
}

uint64_t StepScheduler::UpdateBytes(absl::Span<const uint8_t> updated) const {
  uint64_t bytes = 0;
  for (uint32_t p = 0; p < updated.size(); ++p) {
    if (updated[p] != 0) bytes += update_bytes_[p];
  }
  return bytes;
}

uint64_t StepScheduler::UpdateBytes(uint32_t parameter) const {
  const Layout& layout = layout_;
  const ParameterSpec& spec = layout.parameters()[parameter];
  const uint64_t numel = NumelOf(spec);
  const uint64_t gradients =
      replicated_ && !accumulates() ? partitions_.size() : 1;
  uint64_t bytes = numel * SizeInBytes(SumDTypeOf(parameter)) * gradients;
  const MasterFormat master = layout.master_format(parameter);
  const uint64_t parameter_bytes = numel * SizeInBytes(spec.dtype);
  bytes += 2 * numel * SizeInBytes(master);
  bytes +=
      master == MasterFormat::kFloat32 ? parameter_bytes : 2 * parameter_bytes;
  if (HasPrefixes()) return bytes;
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout.has_state_array(k, spec.group)) continue;
    bytes += 2 * PartBytesOf(layout, kStatePart0 + k, 0, numel).end;
    if (ArrayFormat(layout, k) != StateFormat::kDynamic8) continue;
    bytes += 2 * PartBytesOf(layout, kScalePart0 + k, 0, numel).end;
  }
  return bytes;
}

// Counts the step; if interrupted anywhere, the count is resumed: see
// ControlFile.
void StepScheduler::CountStep(const Update& update) {
  ControlFile& control = *options_.control;
  int64_t* const counts = store_.step_counts().data();
  double* const scalars = store_.scalars().data();
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
      update.groups[layout_.parameters()[parameter].group];
  UpdateInput input;
  input.hyperparams = group.hyperparams;
  input.step_count = store_.step_counts()[parameter] + 1;
  input.gradient_factor = group.gradient_factor;
  input.gradient_limit = update.gradient_limit;
  input.step = update.step;
  if (whole_ != nullptr) return input;
  const UpdateKernel& kernel = *kernels_[parameter];
  if (kernel.advance != nullptr) {
    const double before = input.step_count == 1
                              ? layout_.optimizer_info().scalar_initial
                              : store_.scalars()[parameter];
    input.scalar = kernel.advance(input.hyperparams, input.step_count, before);
  }
  return input;
}

void StepScheduler::ApplyRecord(const RecordView& record,
                                const Update& update) {
  const SubGroup& range = record.sub_group();
  // As a rule all parameters of a group have counted the same steps.
  const UpdateKernel* prepared_by = nullptr;
  UpdateInput prepared;
  UpdateFactors factors;
  for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
    if (update.updated[p] == 0) continue;
    const uint64_t flat = layout_.flat_offset(p);
    const uint64_t flat_begin = std::max(flat, range.begin);
    const uint64_t flat_end =
        std::min(flat + NumelOf(layout_.parameters()[p]), range.end);
    if (flat_begin >= flat_end) continue;
    const UpdateInput input = InputOf(p, update);
    if (kernels_[p] != prepared_by || input.step_count != prepared.step_count ||
        input.scalar != prepared.scalar) {
      factors = kernels_[p]->prepare(input);
      prepared_by = kernels_[p];
      prepared = input;
    }
    ApplyParameter(record, p, flat_begin - flat, flat_end - flat, factors,
                   update);
  }
}

void StepScheduler::ApplyParameter(const RecordView& record, uint32_t parameter,
                                   uint64_t begin, uint64_t end,
                                   const UpdateFactors& factors,
                                   const Update& update) {
  GradientSources sources;
  for (const PieceTable::Entry& piece : OwnersOf(parameter)) {
    const uint64_t piece_begin = std::max(begin, piece.begin);
    const uint64_t piece_end = std::min(end, piece.end);
    if (piece_begin >= piece_end) continue;
    ForEachRun(
        layout_, parameter, piece_begin, piece_end,
        [&](uint64_t run, uint64_t run_begin, uint64_t numel) {
          std::atomic<uint64_t>& stamp = options_.recovery.run_stamps[run];
          if (stamp.load(std::memory_order_relaxed) == update.step) {
            return;
          }
          TileView view = ViewOf(record, parameter, run_begin, numel);
          if (update.speculative) {
            KeepRun(record, run, update.step, parameter, run_begin, numel);
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

// Returns the pieces of a parameter; when replicated, the first rank stands for
// all.
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
  const DType dtype = layout_.parameters()[parameter].gradient_dtype;
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
  (*sources)[0] = store_.sums(parameter, begin);
  return absl::MakeConstSpan(*sources).first(1);
}

TileView StepScheduler::ViewOf(const RecordView& record, uint32_t parameter,
                               uint64_t begin, uint64_t numel) const {
  TileView view;
  view.parameter = record.parameter(parameter, begin);
  view.master = record.master(parameter, begin);
  for (int k = 0; k < kStateArraysMax; ++k) {
    view.state[k] = record.state(k, parameter, begin);
    view.scale[k] = record.scale(k, parameter, begin);
  }
  view.numel = numel;
  view.flat_begin = layout_.flat_offset(parameter) + begin;
  return view;
}

absl::Span<WorkerUndo> StepScheduler::worker_undos() const {
  return {reinterpret_cast<WorkerUndo*>(options_.undo.data()),
          options_.undo.size() / sizeof(WorkerUndo)};
}

WorkerUndo& StepScheduler::worker_undo() const {
  return worker_undos()[static_cast<size_t>(WorkerPool::CurrentParticipant())];
}

absl::Status StepScheduler::ClearState(uint32_t first_parameter) {
  const auto clear = [](absl::Span<std::byte> bytes) {
    std::memset(bytes.data(), 0, bytes.size());
  };
  OPTSTATE_RETURN_IF_ERROR(ForEachElementRange(
      first_parameter, [&](const RecordView& record, uint32_t p, uint64_t begin,
                           uint64_t numel) {
        record.ForEachMasterPart(p, begin, numel, clear);
        if (HasPrefixes()) return;
        record.ForEachStatePart(
            p, begin, numel,
            [&](int /*part*/, absl::Span<std::byte> bytes) { clear(bytes); });
      }));
  for (uint32_t p = first_parameter; p < layout_.parameters().size(); ++p) {
    if (HasPrefixes()) OPTSTATE_RETURN_IF_ERROR(ClearPrefixes(p));
    store_.step_counts()[p] = 0;
    if (!store_.scalars().empty()) store_.scalars()[p] = 0;
  }
  return absl::OkStatus();
}

// Clears arrays that are float32, or have a scale for each block.
absl::Status StepScheduler::ClearPrefixes(uint32_t parameter) {
  const ParameterSpec& spec = layout_.parameters()[parameter];
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout_.has_state_array(k, spec.group)) continue;
    const uint64_t elements =
        StateElements(layout_.optimizer_info(), k, spec.shape);
    OPTSTATE_RETURN_IF_ERROR(store_.ForEachRecord(
        parameter, 0, elements, StateStore::Access::kWrite,
        [&](const RecordView& record, uint64_t begin, uint64_t numel) {
          record.ForEachStatePart(
              parameter, begin, numel,
              [&](int part, absl::Span<std::byte> bytes) {
                if ((part - kStatePart0) % kStateArraysMax != k) return;
                std::memset(bytes.data(), 0, bytes.size());
              });
        }));
  }
  return absl::OkStatus();
}

}  // namespace optstate
