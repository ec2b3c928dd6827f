#include "server/scheduler/scheduler_test_job.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/cast.h"
#include "kernels/master_format.h"
#include "server/scheduler/passes/non_separable_updater.h"
#include "server/scheduler/passes/speculation.h"

namespace optstate::scheduler {
namespace {

std::vector<RankPartition> PartitionsOf(const Layout& layout,
                                        const SchedulerTestJob::Setup& setup) {
  std::vector<RankPartition> partitions;
  for (uint32_t rank = 0; rank < setup.ranks; ++rank) {
    partitions.push_back(*MakeRankPartition(layout,
                                            setup.replicated
                                                ? PartitionMode::kReplicated
                                                : PartitionMode::kContiguous,
                                            setup.ranks, rank));
  }
  return partitions;
}

std::vector<float> Random(std::mt19937_64* random, uint64_t numel) {
  std::normal_distribution<float> values(0, 1);
  std::vector<float> out(numel);
  for (float& x : out) x = values(*random);
  return out;
}

template <typename T>
void Append(const std::vector<T>& array, std::vector<std::byte>* out) {
  const auto bytes =
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(array.data()),
                          array.size() * sizeof(T));
  out->insert(out->end(), bytes.begin(), bytes.end());
}

}  // namespace

Layout SchedulerTestJob::MakeLayout(const Setup& setup) {
  struct Parameter {
    std::vector<int64_t> shape;
    DType dtype;
    uint32_t group;
  };
  const Parameter parameters[] = {
      {{100, 130}, DType::kFloat32, 0}, {{1, 1}, DType::kFloat32, 0},
      {{0, 7}, DType::kBFloat16, 0},    {{70, 64}, DType::kBFloat16, 0},
      {{3, 50}, DType::kBFloat16, 1},   {{90, 91}, DType::kFloat32, 1},
      {{0, 2}, DType::kFloat32, 1},
  };
  LayoutSpec spec;
  spec.optimizer = setup.optimizer;
  spec.state_format = setup.state;
  spec.master_format = setup.master;
  spec.groups.resize(2);
  for (const Parameter& from : parameters) {
    ParameterSpec parameter;
    parameter.name = "p" + std::to_string(spec.parameters.size());
    parameter.shape = from.shape;
    parameter.numel = from.shape[0] * from.shape[1];
    parameter.dtype = parameter.gradient_dtype = from.dtype;
    parameter.group = from.group;
    spec.parameters.push_back(std::move(parameter));
  }
  return *Layout::Make(std::move(spec));
}

SchedulerTestJob::SchedulerTestJob(const Setup& setup)
    : layout_(MakeLayout(setup)),
      partitions_(PartitionsOf(layout_, setup)),
      step_counts_(layout_.parameters().size(), 0),
      scalars_(layout_.parameters().size(), 0),
      run_stamps_(layout_.run_count()),
      staged_marks_(layout_.run_count()),
      actions_(layout_.parameters().size(), StageAction::kStage),
      updated_(layout_.parameters().size(), 1),
      pool_(setup.workers, /*spin=*/false),
      undo_(static_cast<size_t>(setup.workers)),
      redo_(NonSeparableUpdater::RedoBytes(layout_, setup.workers)),
      speculation_(Speculation::Bytes(layout_)) {
  Place(setup);
  FillState(setup.seed);
  for (const RankPartition& partition : partitions_) {
    gradients_.emplace_back(partition.gradient_area_bytes);
    areas_.push_back(gradients_.back().data());
  }
  FillGradients(setup.seed);
  GroupUpdate group;
  group.hyperparams = DefaultHyperparams(setup.optimizer);
  group.gradient_factor = 0.5;
  groups_.assign(2, group);
  groups_[1].gradient_factor = 0.25;
}

void SchedulerTestJob::Place(const Setup& setup) {
  const uint64_t elements = layout_.flat_elements();
  storage::StateArrays arrays;
  parameters_.resize(layout_.parameter_area_bytes());
  arrays.parameters = parameters_.data();
  master_.resize(elements * sizeof(float));
  arrays.master = master_.data();
  for (size_t k = 0; k < kStateArraysMax; ++k) {
    if (!layout_.has_state_array(static_cast<int>(k))) continue;
    state_[k].resize(elements * sizeof(float));
    arrays.state[k] = state_[k].data();
    if (setup.state != StateFormat::kDynamic8) continue;
    scale_[k].resize(elements / kQuantizedBlockElements);
    arrays.scale[k] = scale_[k].data();
  }
  sums_.resize(elements * sizeof(float));
  if (setup.accumulation == AccumulateDType::kFloat32) {
    arrays.accumulator = reinterpret_cast<float*>(sums_.data());
  } else if (setup.accumulation == AccumulateDType::kGradient) {
    arrays.gradient_accumulator = sums_.data();
  }
  arrays.step_counts = step_counts_.data();
  if (!layout_.optimizer_info().scalar.empty())
    arrays.scalars = scalars_.data();
  store_ =
      std::make_unique<storage::HostStore>(&layout_, 2 * kTileElements, arrays);
  plan_ = *StepPlan::Make(&layout_, setup.accumulation, 2 * kTileElements);
  plan_->SetPartitions(partitions_, setup.replicated);
  memory_.store = store_.get();
  memory_.recovery.run_stamps = run_stamps_.data();
  memory_.recovery.staged_marks = staged_marks_.data();
  memory_.control = &control_;
  memory_.undo = absl::MakeSpan(undo_);
  memory_.redo = absl::MakeSpan(redo_);
  memory_.speculation = absl::MakeSpan(speculation_);
}

void SchedulerTestJob::FillState(uint64_t seed) {
  std::mt19937_64 random(seed);
  for (uint32_t p = 0; p < layout_.parameters().size(); ++p) {
    const uint64_t numel = plan_->numel(p);
    if (numel == 0) continue;
    const std::vector<float> masters = Random(&random, numel);
    for (uint64_t begin = 0; begin < numel;) {
      const storage::RecordView record = RecordOf(p, begin);
      const uint64_t end =
          std::min(numel, record.sub_group().end - layout_.flat_offset(p));
      kernels::MasterFromFloat(
          layout_.master_format(p), layout_.parameters()[p].dtype,
          masters.data() + begin, record.parameter(p, begin),
          record.master(p, begin), end - begin);
      begin = end;
    }
  }
}

void SchedulerTestJob::FillGradients(uint64_t seed) {
  std::mt19937_64 random(seed * 7919 + 13);
  for (size_t rank = 0; rank < partitions_.size(); ++rank) {
    for (const Piece& piece : partitions_[rank].pieces) {
      const std::vector<float> values = Random(&random, piece.numel);
      kernels::CastFromFloat(
          layout_.parameters()[piece.parameter].gradient_dtype, values.data(),
          gradients_[rank].data() + piece.gradient_offset_bytes, piece.numel);
    }
  }
}

StagingRequest SchedulerTestJob::StagingOf(uint32_t rank, uint64_t mark) const {
  return {.rank = rank,
          .gradient_areas = areas_,
          .actions = absl::MakeConstSpan(actions_).first(
              partitions_[rank].pieces.size()),
          .staged_mark = mark};
}

StepUpdate SchedulerTestJob::UpdateOf(uint64_t step) const {
  StepUpdate update;
  update.step = step;
  update.groups = groups_;
  update.updated = updated_;
  update.gradient_areas = areas_;
  return update;
}

std::vector<std::byte> SchedulerTestJob::State() const {
  std::vector<std::byte> out;
  Append(parameters_, &out);
  Append(master_, &out);
  for (const auto& array : state_) Append(array, &out);
  for (const auto& array : scale_) Append(array, &out);
  Append(step_counts_, &out);
  Append(scalars_, &out);
  return out;
}

}  // namespace optstate::scheduler
