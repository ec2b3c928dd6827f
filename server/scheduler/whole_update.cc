// Applies non-separable updates, which need a whole parameter at once.
//
// Nothing is rolled back here: all new values of a parameter are made beside
// the old ones, as floats in the worker's part of the `redo` file, and only
// when they are complete does the worker's slot say so (kReplace). From then on
// they are installed, in the formats of the job, as often as need be: each time
// the same bytes, random ones included, for only `redo` and the step are read.
// Before that, a later process begins anew. A parameter is one worker's work,
// so workers wait for one that is much larger than the others.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "kernels/factors.h"
#include "kernels/master_format.h"
#include "kernels/state_format.h"
#include "proto/types/array_format.h"
#include "proto/types/runs.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/step_scheduler.h"
#include "server/scheduler/worker_undo.h"

namespace optstate {
namespace {

constexpr uint64_t kAlignBytes = 64;

// Returns the aligned size of an array of floats.
uint64_t AlignedBytes(uint64_t elements) {
  return (elements * sizeof(float) + kAlignBytes - 1) / kAlignBytes *
         kAlignBytes;
}

uint64_t NumelOf(const ParameterSpec& spec) {
  return static_cast<uint64_t>(spec.numel);
}

uint64_t ElementsOf(const Layout& layout, int index,
                    const ParameterSpec& spec) {
  if (!layout.has_state_array(index, spec.group)) return 0;
  return StateElements(layout.optimizer_info(), index, spec.shape);
}

// Returns the size of a worker's part of the redo file, enough for any
// parameter.
uint64_t RedoPartBytes(const Layout& layout) {
  uint64_t most = 0;
  for (const ParameterSpec& spec : layout.parameters()) {
    uint64_t bytes = AlignedBytes(NumelOf(spec));
    for (int k = 0; k < kStateArraysMax; ++k) {
      bytes += AlignedBytes(ElementsOf(layout, k, spec));
    }
    most = std::max(most, bytes);
  }
  return most;
}

// Returns the size of a worker's part of the workspace: the gradient, the
// floats of a split master, then the kernel's scratch memory.
uint64_t WorkspacePartBytes(const Layout& layout, const WholeKernel& kernel) {
  uint64_t most = 0;
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const ParameterSpec& spec = layout.parameters()[p];
    const bool is_split = layout.master_format(p) == MasterFormat::kSplit;
    most =
        std::max(most, (is_split ? 2 : 1) * AlignedBytes(NumelOf(spec)) +
                           AlignedBytes(kernel.workspace_elements(spec.shape)));
  }
  return most;
}

bool IsMaximize(const OptimizerInfo& info, const Hyperparams& hyperparams) {
  return info.maximize >= 0 &&
         hyperparams[static_cast<size_t>(info.maximize)] != 0;
}

}  // namespace

absl::Status StepScheduler::CheckWholeKernel(const Layout& layout,
                                             const WholeKernel& kernel) {
  for (const ParameterSpec& spec : layout.parameters()) {
    OPTSTATE_RETURN_IF_ERROR(
        Annotate(kernel.check_shape(spec.shape), spec.name));
  }
  return absl::OkStatus();
}

uint64_t StepScheduler::RedoBytes(const Layout& layout, int workers) {
  if (FindWholeKernel(layout.optimizer()) == nullptr) return 0;
  return static_cast<uint64_t>(workers) * RedoPartBytes(layout);
}

uint64_t StepScheduler::RedoBytesInUse(const Layout& layout,
                                       absl::Span<const std::byte> undo) {
  if (FindWholeKernel(layout.optimizer()) == nullptr) return 0;
  const absl::Span<const WorkerUndo> slots(
      reinterpret_cast<const WorkerUndo*>(undo.data()),
      undo.size() / sizeof(WorkerUndo));
  uint64_t parts = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    const bool is_used = slots[i].kind.load(std::memory_order_relaxed) ==
                         static_cast<uint64_t>(UndoKind::kReplace);
    if (is_used) parts = i + 1;
  }
  return parts * RedoPartBytes(layout);
}

uint64_t StepScheduler::WorkspaceBytes(const Layout& layout, int workers) {
  const WholeKernel* const kernel = FindWholeKernel(layout.optimizer());
  if (kernel == nullptr) return 0;
  return static_cast<uint64_t>(workers) * WorkspacePartBytes(layout, *kernel);
}

// Takes the pages now, while the admission of the job holds its lock: a later
// job would be promised the same memory, and the kernel would kill the engine
// inside a step. Each worker takes its own, on its node as a rule.
absl::Status StepScheduler::MakeWorkspace() {
  const uint64_t part = WorkspacePartBytes(layout_, *whole_);
  const int workers = options_.pool->participants();
  const uint64_t bytes = part * static_cast<uint64_t>(workers);
  workspace_elements_ = part / sizeof(float);
  workspace_.reset(static_cast<float*>(std::aligned_alloc(kAlignBytes, bytes)));
  if (bytes == 0) return absl::OkStatus();
  if (workspace_ == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a workspace of ", bytes, " bytes"));
  }
  options_.pool->ParallelFor(static_cast<size_t>(workers), [&](size_t worker) {
    std::memset(workspace_.get() + worker * workspace_elements_, 0, part);
  });
  return absl::OkStatus();
}

std::byte* StepScheduler::RedoOf(const WorkerUndo& undo) const {
  const auto worker = static_cast<uint64_t>(&undo - worker_undos().data());
  return options_.redo.data() + worker * RedoPartBytes(layout_);
}

bool StepScheduler::IsUpdated(uint32_t parameter, uint64_t step) const {
  // Runs are stamped in order.
  const uint64_t end = layout_.first_run(parameter + 1);
  return end == layout_.first_run(parameter) ||
         options_.recovery.run_stamps[end - 1].load(
             std::memory_order_relaxed) == step;
}

// Updates the parameters of a record, which are whole there.
void StepScheduler::ApplyWholesOf(const RecordView& record,
                                  const Update& update) {
  const SubGroup& range = record.sub_group();
  for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
    const uint64_t flat = layout_.flat_offset(p);
    if (flat < range.begin || flat >= range.end || update.updated[p] == 0 ||
        IsUpdated(p, update.step)) {
      continue;
    }
    ApplyWhole(record, p, update);
  }
}

void StepScheduler::ApplyWhole(const RecordView& record, uint32_t parameter,
                               const Update& update) {
  const ParameterSpec& spec = layout_.parameters()[parameter];
  WorkerUndo& undo = worker_undo();
  float* const gradient =
      workspace_.get() + static_cast<uint64_t>(&undo - worker_undos().data()) *
                             workspace_elements_;
  GatherGradient(parameter, update, gradient);

  const TileView old = ViewOf(record, parameter, 0, NumelOf(spec));
  const uint64_t array_elements = AlignedBytes(old.numel) / sizeof(float);
  WholeView view;
  view.shape = spec.shape;
  view.numel = old.numel;
  view.gradient = gradient;
  view.workspace = gradient + array_elements;
  view.master = static_cast<const float*>(old.master);
  if (layout_.master_format(parameter) == MasterFormat::kSplit) {
    MasterToFloat(MasterFormat::kSplit, old.parameter, old.master,
                  view.workspace, old.numel);
    view.master = view.workspace;
    view.workspace += array_elements;
  }
  std::byte* redo = RedoOf(undo);
  view.new_master = reinterpret_cast<float*>(redo);
  redo += AlignedBytes(old.numel);
  for (int k = 0; k < kStateArraysMax; ++k) {
    const uint64_t elements = ElementsOf(layout_, k, spec);
    view.state[k] = static_cast<const float*>(old.state[k]);
    view.new_state[k] = reinterpret_cast<float*>(redo);
    redo += AlignedBytes(elements);
    const StateFormat format = ArrayFormat(layout_, k);
    if (elements == 0 || format == StateFormat::kFloat32) continue;
    StateToFloat(format, IsNeverNegative(layout_.optimizer(), k), old.state[k],
                 old.scale[k], view.new_state[k], elements);
    view.state[k] = view.new_state[k];
  }
  whole_->compute(InputOf(parameter, update), view);

  undo.Begin(UndoKind::kReplace, layout_.first_run(parameter), update.step);
  PutInPlace(record, &undo, RedoOf(undo));
}

// Installs the new values of the parameter that the slot names. Idempotent: a
// crash in here repeats it.
void StepScheduler::PutInPlace(const RecordView& record, WorkerUndo* undo,
                               std::byte* redo) {
  const uint32_t parameter = ParameterOfRun(undo->run);
  const ParameterSpec& spec = layout_.parameters()[parameter];
  const TileView view = ViewOf(record, parameter, 0, NumelOf(spec));
  MasterFromFloat(layout_.master_format(parameter), spec.dtype,
                  reinterpret_cast<const float*>(redo), view.parameter,
                  view.master, view.numel);
  redo += AlignedBytes(view.numel);
  UpdateInput input;
  input.step = undo->stamp;
  StateRandom random;
  random.seed = CommonFactors(input, /*maximize=*/false).random_seed;
  random.flat_begin = view.flat_begin;
  for (int k = 0; k < kStateArraysMax; ++k) {
    const uint64_t elements = ElementsOf(layout_, k, spec);
    if (elements == 0) continue;
    random.array = k;
    StateFromUpdate(ArrayFormat(layout_, k),
                    IsNeverNegative(layout_.optimizer(), k), random,
                    reinterpret_cast<const float*>(redo), view.state[k],
                    view.scale[k], elements);
    redo += AlignedBytes(elements);
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
  for (uint64_t run = undo->run; run < layout_.first_run(parameter + 1);
       ++run) {
    options_.recovery.run_stamps[run].store(undo->stamp,
                                            std::memory_order_release);
    if (options_.observer != nullptr) {
      options_.observer->OnRunUpdated(undo->stamp, run);
    }
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
  undo->Clear();
}

// Gathers the gradient as an update kernel takes it: summed in order, scaled,
// cut.
void StepScheduler::GatherGradient(uint32_t parameter, const Update& update,
                                   float* out) {
  const ParameterSpec& spec = layout_.parameters()[parameter];
  const DType dtype = SumDTypeOf(parameter);
  GradientSources sources;
  for (const PieceTable::Entry& piece : OwnersOf(parameter)) {
    ForEachRun(layout_, parameter, piece.begin, piece.end,
               [&](uint64_t /*run*/, uint64_t begin, uint64_t numel) {
                 Accumulate(
                     dtype,
                     GradientsOf(parameter, piece, begin, update, &sources),
                     /*first=*/true, out + begin, numel);
               });
  }
  const UpdateInput input = InputOf(parameter, update);
  const UpdateFactors factors = CommonFactors(
      input, IsMaximize(layout_.optimizer_info(), input.hyperparams));
  for (uint64_t i = 0; i < NumelOf(spec); ++i) {
    const float scaled = out[i] * factors.gradient_factor;
    out[i] =
        std::clamp(scaled, -factors.gradient_limit, factors.gradient_limit);
  }
}

}  // namespace optstate
