#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENTS_TEST_RUNS_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENTS_TEST_RUNS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/executors/residents_test_record.h"

// The runs of a job whose records stay on devices, and the formats that tests
// give them.
namespace optstate::scheduler::residents {

inline constexpr size_t kPositions = 9;
inline constexpr size_t kRunsOfPosition = 4;
inline constexpr size_t kRuns = kPositions * kRunsOfPosition;
// Returns the run that the tasks of all positions have at this place.
// Neighbours in the flat space, where runs have their order, are not those of a
// position.
inline size_t RunAt(size_t place) {
  return place / kRunsOfPosition + place % kRunsOfPosition * kPositions;
}
inline constexpr size_t kNumels[] = {1, 101, 1000, kTileElements, 257};
// Each run has a tile of its own.
inline constexpr uint64_t kFlatEnd = kRuns * kTileElements;
inline constexpr size_t kSlots = 16;
inline constexpr size_t kWorkers = 3;

struct Run {
  kernels::UpdateKernelKey key;
  const kernels::UpdateKernel* kernel = nullptr;
  std::unique_ptr<Record> tested;
  std::unique_ptr<Record> wanted;  // updated by the CPU's kernel alone
  // With several ranks the update is given their sum on the device.
  kernels::UpdateKernelKey sum_key;
  const kernels::UpdateKernel* sum_kernel = nullptr;
  absl::Span<float> gradient;  // of the first rank, with room for any dtype
  // The gradients of ranks that have one in this step.
  std::vector<const void*> gradients;
  kernels::UpdateFactors factors;
  int64_t step_count = 0;
  bool is_visited = false;  // in this step
  uint64_t wanted_stamp = 0;
  std::atomic<uint64_t> stamp{0};
  uint64_t numel() const { return tested->view().numel; }
  uint64_t log_gradient_bytes(bool is_sum) const {
    return numel() * SizeInBytes(is_sum ? sum_key.gradient : key.gradient);
  }
  uint64_t gradient_bytes() const {
    return numel() * SizeInBytes(key.gradient);
  }
  bool IsIn(uint64_t begin, uint64_t end) const {
    const uint64_t at = tested->view().flat_begin;
    return begin <= at && at < end;
  }
};

struct Param {
  std::string name;
  std::vector<kernels::UpdateKernelKey> keys;  // which runs have in turn
  bool is_cuda = false;
};
inline void PrintTo(const Param& param, std::ostream* out) {
  *out << param.name;
}

// Each run is a parameter of a group of its own.
inline Layout LayoutOf(const Param& param, const std::vector<size_t>& numels) {
  LayoutSpec spec;
  spec.optimizer = param.keys[0].optimizer;
  spec.state_format = param.keys[0].state;
  if (param.keys[0].master == MasterFormat::kSplit) {
    spec.master_format = MasterFormat::kSplit;
  }
  for (size_t i = 0; i < kRuns; ++i) {
    const kernels::UpdateKernelKey& key = param.keys[i % param.keys.size()];
    spec.groups.push_back({key.options});
    ParameterSpec& parameter = spec.parameters.emplace_back();
    parameter.name = absl::StrCat("run ", i);
    parameter.numel = static_cast<int64_t>(numels[i]);
    parameter.shape = {parameter.numel};
    parameter.dtype = key.parameter;
    parameter.gradient_dtype = key.gradient;
    parameter.group = static_cast<uint32_t>(i);
  }
  return *Layout::Make(std::move(spec));
}
inline SubGroup SubGroupOf(size_t run) {
  SubGroup sub_group;
  sub_group.begin = run * kTileElements;
  sub_group.end = sub_group.begin + kTileElements;
  return sub_group;
}

inline kernels::UpdateKernelKey KeyOf(OptimizerKind kind, DType dtype,
                                      StateFormat state, uint32_t options = 0) {
  kernels::UpdateKernelKey key = {kind, options, dtype, dtype, state};
  if (dtype == DType::kFloat32) key.master = MasterFormat::kParameter;
  return key;
}

inline kernels::UpdateKernelKey Halves(kernels::UpdateKernelKey key) {
  key.master = MasterFormat::kSplit;
  return key;
}

inline std::vector<Param> Formats(bool is_cuda) {
  using enum OptimizerKind;
  using enum StateFormat;
  constexpr DType kOwn = DType::kFloat32, kHalf = DType::kBFloat16;
  std::vector<Param> formats = {
      {"OwnMaster", {KeyOf(kAdamW, kOwn, kFloat32)}},
      {"BFloat16", {KeyOf(kAdamW, kHalf, kFloat32)}},
      {"BFloat16States", {KeyOf(kAdamW, kHalf, kBFloat16)}},
      {"Dynamic8", {KeyOf(kAdamW, kHalf, kDynamic8)}},
      {"Split", {Halves(KeyOf(kAdamW, kHalf, kFloat32))}},
      {"SplitDynamic8", {Halves(KeyOf(kAdamW, kHalf, kDynamic8))}},
      {"OneState", {KeyOf(kSgd, kOwn, kFloat32, sgd::kHasMomentum)}},
      {"StatesWithAGap",
       {KeyOf(kRmsprop, kHalf, kDynamic8, rmsprop::kCentered)}},
      {"Mixed",
       {KeyOf(kAdam, kOwn, kDynamic8), KeyOf(kAdam, kHalf, kDynamic8),
        KeyOf(kAdam, kOwn, kDynamic8, adam::kAmsgrad)}}};
  for (Param& format : formats) format.is_cuda = is_cuda;
  return formats;
}

}  // namespace optstate::scheduler::residents

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENTS_TEST_RUNS_H_
