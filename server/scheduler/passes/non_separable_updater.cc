#include "server/scheduler/passes/non_separable_updater.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "kernels/factors.h"
#include "kernels/master_format.h"
#include "kernels/state_format.h"
#include "kernels/whole_kernel.h"
#include "proto/types/array_format.h"
#include "proto/types/runs.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/tile_view.h"
#include "storage/persist_in_order.h"

namespace optstate::scheduler {
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
uint64_t WorkspacePartBytes(const Layout& layout,
                            const kernels::WholeKernel& kernel) {
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

uint64_t NonSeparableUpdater::RedoBytes(const Layout& layout, int workers) {
  if (kernels::FindWholeKernel(layout.optimizer()) == nullptr) return 0;
  return static_cast<uint64_t>(workers) * RedoPartBytes(layout);
}

uint64_t NonSeparableUpdater::RedoBytesInUse(const Layout& layout,
                                             absl::Span<const std::byte> undo) {
  if (kernels::FindWholeKernel(layout.optimizer()) == nullptr) return 0;
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

uint64_t NonSeparableUpdater::WorkspaceBytes(const Layout& layout,
                                             int workers) {
  const kernels::WholeKernel* const kernel =
      kernels::FindWholeKernel(layout.optimizer());
  if (kernel == nullptr) return 0;
  return static_cast<uint64_t>(workers) * WorkspacePartBytes(layout, *kernel);
}

NonSeparableUpdater::NonSeparableUpdater(
    const StepPlan* plan, const StepMemory* memory, WorkerPool* pool,
    UpdateExecutor* executor, const StepCounts* counts, StepObserver* observer)
    : plan_(*plan),
      memory_(*memory),
      pool_(*pool),
      executor_(*executor),
      counts_(*counts),
      observer_(observer),
      addresses_(plan, memory->store),
      pass_(plan, memory, executor),
      slots_(new Slot[executor->slots()]),
      redo_bytes_(RedoPartBytes(plan->layout())),
      workspace_elements_(
          WorkspacePartBytes(plan->layout(), *plan->non_separable_kernel()) /
          sizeof(float)) {
  key_.optimizer = plan->layout().optimizer();
  for (size_t i = 0; i < executor->slots(); ++i) slots_[i].SetUpdater(this);
}

// Takes the pages now, while the admission of the job holds its lock: a later
// job would be promised the same memory, and the kernel would kill the engine
// inside a step. Each worker takes its own, on its node as a rule.
absl::Status NonSeparableUpdater::Init() {
  const uint64_t part = workspace_elements_ * sizeof(float);
  const auto workers = static_cast<size_t>(pool_.participants());
  const uint64_t bytes = part * workers;
  workspace_.reset(static_cast<float*>(std::aligned_alloc(kAlignBytes, bytes)));
  if (bytes == 0) return absl::OkStatus();
  if (workspace_ == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a workspace of ", bytes, " bytes"));
  }
  pool_.ParallelFor(workers, [&](size_t worker) {
    std::memset(workspace_.get() + worker * workspace_elements_, 0, part);
  });
  return absl::OkStatus();
}

absl::Status NonSeparableUpdater::MakePass(const StepUpdate& update) {
  OPTSTATE_ASSIGN_OR_RETURN(const size_t positions, pass_.Begin(update));
  update_ = &update;
  return executor_.Update({0, positions, positions}, this);
}

absl::Status NonSeparableUpdater::Open(size_t slot, size_t position) {
  auto pin = pass_.Pin(position);
  if (!pin.ok()) return pin.status();
  slots_[slot].Open(*std::move(pin));
  return absl::OkStatus();
}

bool NonSeparableUpdater::IsUpdated(uint32_t parameter, uint64_t step) const {
  // Runs are stamped in order.
  const Layout& layout = plan_.layout();
  const uint64_t end = layout.first_run(parameter + 1);
  return end == layout.first_run(parameter) ||
         memory_.recovery.run_stamps[end - 1].load(std::memory_order_relaxed) ==
             step;
}

// Visits the parameters of a record, which are whole there.
void NonSeparableUpdater::ForEachTask(
    size_t slot, absl::FunctionRef<void(UpdateTask&)> visit) {
  const SubGroup& range = slots_[slot].record().sub_group();
  const kernels::UpdateFactors factors;  // the kernels make their own
  UpdateTask task;
  task.step = update_->step;
  task.key = &key_;
  task.factors = &factors;
  task.whole = &slots_[slot];
  for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
    const uint64_t flat = plan_.layout().flat_offset(p);
    if (flat < range.begin || flat >= range.end || update_->updated[p] == 0 ||
        IsUpdated(p, update_->step)) {
      continue;
    }
    task.parameter = p;
    task.run = plan_.layout().first_run(p);
    task.stamp =
        &memory_.recovery.run_stamps[plan_.layout().first_run(p + 1) - 1];
    task.view.numel = plan_.numel(p);
    visit(task);
  }
}

WholeParameter NonSeparableUpdater::Describe(uint32_t parameter) const {
  WholeParameter description = WholeParameterOf(plan_.layout(), parameter);
  description.input = counts_.InputOf(parameter, *update_);
  return description;
}

void NonSeparableUpdater::Gather(const storage::RecordView& record,
                                 uint32_t parameter,
                                 const WholeArrays& to) const {
  const Layout& layout = plan_.layout();
  const ParameterSpec& spec = layout.parameters()[parameter];
  GatherGradient(parameter, to.gradient);
  const kernels::TileView view =
      TileViewOf(layout, record, parameter, 0, NumelOf(spec));
  if (to.master != nullptr) {
    kernels::MasterToFloat(layout.master_format(parameter), view.parameter,
                           view.master, to.master, view.numel);
  }
  for (int k = 0; k < kStateArraysMax; ++k) {
    const uint64_t elements = ElementsOf(layout, k, spec);
    if (elements == 0 || to.state[k] == nullptr) continue;
    kernels::StateToFloat(ArrayFormat(layout, k),
                          IsNeverNegative(layout.optimizer(), k), view.state[k],
                          view.scale[k], to.state[k], elements);
  }
}

void NonSeparableUpdater::WriteBack(const storage::RecordView& record,
                                    uint32_t parameter,
                                    const WholeArrays& from) {
  const Layout& layout = plan_.layout();
  const ParameterSpec& spec = layout.parameters()[parameter];
  WorkerUndo& slot = undo();
  std::byte* redo = RedoOf(slot);
  std::memcpy(redo, from.master, NumelOf(spec) * sizeof(float));
  redo += AlignedBytes(NumelOf(spec));
  for (int k = 0; k < kStateArraysMax; ++k) {
    const uint64_t elements = ElementsOf(layout, k, spec);
    if (elements == 0) continue;
    std::memcpy(redo, from.state[k], elements * sizeof(float));
    redo += AlignedBytes(elements);
  }
  Replace(record, parameter, &slot);
}

void NonSeparableUpdater::UpdateParameter(const storage::RecordView& record,
                                          uint32_t parameter) {
  const Layout& layout = plan_.layout();
  const ParameterSpec& spec = layout.parameters()[parameter];
  WorkerUndo& slot = undo();
  float* const gradient =
      workspace_.get() + WorkerOf(slot) * workspace_elements_;
  GatherGradient(parameter, gradient);

  const kernels::TileView old =
      TileViewOf(layout, record, parameter, 0, NumelOf(spec));
  const uint64_t array_elements = AlignedBytes(old.numel) / sizeof(float);
  kernels::WholeView view;
  view.shape = spec.shape;
  view.numel = old.numel;
  view.gradient = gradient;
  view.workspace = gradient + array_elements;
  view.master = static_cast<const float*>(old.master);
  if (layout.master_format(parameter) == MasterFormat::kSplit) {
    kernels::MasterToFloat(MasterFormat::kSplit, old.parameter, old.master,
                           view.workspace, old.numel);
    view.master = view.workspace;
    view.workspace += array_elements;
  }
  std::byte* redo = RedoOf(slot);
  view.new_master = reinterpret_cast<float*>(redo);
  redo += AlignedBytes(old.numel);
  for (int k = 0; k < kStateArraysMax; ++k) {
    const uint64_t elements = ElementsOf(layout, k, spec);
    view.state[k] = static_cast<const float*>(old.state[k]);
    view.new_state[k] = reinterpret_cast<float*>(redo);
    redo += AlignedBytes(elements);
    const StateFormat format = ArrayFormat(layout, k);
    if (elements == 0 || format == StateFormat::kFloat32) continue;
    kernels::StateToFloat(format, IsNeverNegative(layout.optimizer(), k),
                          old.state[k], old.scale[k], view.new_state[k],
                          elements);
    view.state[k] = view.new_state[k];
  }
  plan_.non_separable_kernel()->compute(counts_.InputOf(parameter, *update_),
                                        view);
  Replace(record, parameter, &slot);
}

void NonSeparableUpdater::Replace(const storage::RecordView& record,
                                  uint32_t parameter, WorkerUndo* undo) {
  undo->Begin(UndoKind::kReplace, plan_.layout().first_run(parameter),
              update_->step);
  PutInPlace(record, undo);
}

void NonSeparableUpdater::PutInPlace(const storage::RecordView& record,
                                     WorkerUndo* undo) {
  const Layout& layout = plan_.layout();
  const uint32_t parameter = plan_.ParameterOfRun(undo->run);
  const ParameterSpec& spec = layout.parameters()[parameter];
  const kernels::TileView view =
      TileViewOf(layout, record, parameter, 0, NumelOf(spec));
  const std::byte* redo = RedoOf(*undo);
  kernels::MasterFromFloat(layout.master_format(parameter), spec.dtype,
                           reinterpret_cast<const float*>(redo), view.parameter,
                           view.master, view.numel);
  redo += AlignedBytes(view.numel);
  kernels::UpdateInput input;
  input.step = undo->stamp;
  kernels::StateRandom random;
  random.seed = kernels::CommonFactors(input, /*maximize=*/false).random_seed;
  random.flat_begin = view.flat_begin;
  for (int k = 0; k < kStateArraysMax; ++k) {
    const uint64_t elements = ElementsOf(layout, k, spec);
    if (elements == 0) continue;
    random.array = k;
    kernels::StateFromUpdate(ArrayFormat(layout, k),
                             IsNeverNegative(layout.optimizer(), k), random,
                             reinterpret_cast<const float*>(redo),
                             view.state[k], view.scale[k], elements);
    redo += AlignedBytes(elements);
  }
  storage::PersistInOrder(storage::PersistPoint::kReplacedStamps);
  for (uint64_t run = undo->run; run < layout.first_run(parameter + 1); ++run) {
    memory_.recovery.run_stamps[run].store(undo->stamp,
                                           std::memory_order_release);
    if (observer_ != nullptr) observer_->OnRunUpdated(undo->stamp, run);
  }
  storage::PersistInOrder(storage::PersistPoint::kReplacedSlot);
  undo->Clear();
}

// Gathers the gradient as an update kernel takes it: summed in order, scaled,
// cut.
void NonSeparableUpdater::GatherGradient(uint32_t parameter, float* out) const {
  const StepUpdate& update = *update_;
  const Layout& layout = plan_.layout();
  const DType dtype = plan_.sum_dtype(parameter);
  GradientAddresses::Buffer buffer;
  for (const PieceTable::Entry& piece : plan_.OwnersOf(parameter)) {
    ForEachRun(
        layout, parameter, piece.begin, piece.end,
        [&](uint64_t /*run*/, uint64_t begin, uint64_t numel) {
          kernels::Accumulate(
              dtype,
              addresses_.OfUpdate(parameter, piece, begin, update, &buffer),
              /*first=*/true, out + begin, numel);
        });
  }
  const kernels::UpdateInput input = counts_.InputOf(parameter, update);
  const kernels::UpdateFactors factors = kernels::CommonFactors(
      input, IsMaximize(layout.optimizer_info(), input.hyperparams));
  for (uint64_t i = 0; i < plan_.numel(parameter); ++i) {
    const float scaled = out[i] * factors.gradient_factor;
    out[i] =
        std::clamp(scaled, -factors.gradient_limit, factors.gradient_limit);
  }
}

}  // namespace optstate::scheduler
