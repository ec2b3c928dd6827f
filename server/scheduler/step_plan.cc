#include "server/scheduler/step_plan.h"

#include "proto/types/array_format.h"
#include "proto/types/status_macros.h"
#include "storage/record_view.h"
#include "storage/state_scales.h"

namespace optstate::scheduler {
namespace {

absl::StatusOr<StepPlan::Kernel> KernelOf(const Layout& layout, uint32_t p,
                                          Accumulation accumulation) {
  const ParameterSpec& spec = layout.parameters()[p];
  StepPlan::Kernel kernel;
  kernel.key.optimizer = layout.optimizer();
  kernel.key.options = layout.groups()[spec.group].options;
  kernel.key.state = layout.state_format();
  kernel.key.master = layout.master_format(p);
  kernel.key.gradient = accumulation == AccumulateDType::kFloat32
                            ? DType::kFloat32
                            : spec.gradient_dtype;
  kernel.key.parameter = spec.dtype;
  OPTSTATE_ASSIGN_OR_RETURN(kernel.functions,
                            kernels::FindUpdateKernel(kernel.key));
  return kernel;
}

absl::Status CheckShapes(const Layout& layout,
                         const kernels::WholeKernel& kernel) {
  for (const ParameterSpec& spec : layout.parameters()) {
    OPTSTATE_RETURN_IF_ERROR(
        Annotate(kernel.check_shape(spec.shape), spec.name));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status StepPlan::CheckKernels(const Layout& layout,
                                    Accumulation accumulation) {
  const kernels::WholeKernel* const whole =
      kernels::FindWholeKernel(layout.optimizer());
  if (whole != nullptr) return CheckShapes(layout, *whole);
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    OPTSTATE_RETURN_IF_ERROR(
        Annotate(KernelOf(layout, p, accumulation).status(),
                 layout.parameters()[p].name));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<StepPlan>> StepPlan::Make(
    const Layout* layout, Accumulation accumulation, uint64_t grain_elements) {
  std::unique_ptr<StepPlan> plan(
      new StepPlan(layout, accumulation, grain_elements));
  plan->non_separable_ = kernels::FindWholeKernel(layout->optimizer());
  if (plan->non_separable_ != nullptr) return plan;
  plan->kernels_.reserve(layout->parameters().size());
  plan->sum_kernels_.reserve(layout->parameters().size());
  for (uint32_t p = 0; p < layout->parameters().size(); ++p) {
    OPTSTATE_ASSIGN_OR_RETURN(const Kernel kernel,
                              KernelOf(*layout, p, accumulation));
    plan->kernels_.push_back(kernel);
    OPTSTATE_ASSIGN_OR_RETURN(const Kernel of_sum,
                              KernelOf(*layout, p, AccumulateDType::kFloat32));
    plan->sum_kernels_.push_back(of_sum);
  }
  return plan;
}

void StepPlan::SetPartitions(absl::Span<const RankPartition> partitions,
                             bool replicated) {
  partitions_ = partitions;
  is_replicated_ = replicated;
  const auto parameters = static_cast<uint32_t>(layout_.parameters().size());
  pieces_.emplace(parameters, partitions);
  update_bytes_.resize(parameters);
  for (uint32_t p = 0; p < parameters; ++p) {
    update_bytes_[p] = UpdateBytesOf(p);
  }
}

// Returns the last parameter whose first run is not behind this one: parameters
// without runs share its first run, and the last one owns the run.
uint32_t StepPlan::ParameterOfRun(uint64_t run) const {
  uint32_t first = 0;
  auto count = static_cast<uint32_t>(layout_.parameters().size());
  while (count > 1) {
    const uint32_t half = count / 2;
    if (layout_.first_run(first + half) <= run) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return first;
}

uint64_t StepPlan::UpdateBytes(absl::Span<const uint8_t> updated) const {
  uint64_t bytes = 0;
  for (uint32_t p = 0; p < updated.size(); ++p) {
    if (updated[p] != 0) bytes += update_bytes_[p];
  }
  return bytes;
}

uint64_t StepPlan::UpdateBytesOf(uint32_t parameter) const {
  const ParameterSpec& spec = layout_.parameters()[parameter];
  const uint64_t elements = numel(parameter);
  const uint64_t gradients =
      is_replicated_ && !accumulates() ? partitions_.size() : 1;
  uint64_t bytes = elements * SizeInBytes(sum_dtype(parameter)) * gradients;
  const MasterFormat master = layout_.master_format(parameter);
  const uint64_t parameter_bytes = elements * SizeInBytes(spec.dtype);
  bytes += 2 * elements * SizeInBytes(master);
  bytes +=
      master == MasterFormat::kFloat32 ? parameter_bytes : 2 * parameter_bytes;
  if (layout_.optimizer_info().has_prefixes()) return bytes;
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout_.has_state_array(k, spec.group)) continue;
    bytes +=
        2 * storage::PartBytesOf(layout_, storage::kStatePart0 + k, 0, elements)
                .end;
    if (!storage::HasScales(ArrayFormat(layout_, k))) continue;
    bytes +=
        2 * storage::PartBytesOf(layout_, storage::kScalePart0 + k, 0, elements)
                .end;
  }
  return bytes;
}

}  // namespace optstate::scheduler
