#ifndef OPTSTATE_TESTS_GPU_HOST_RECORDS_H_
#define OPTSTATE_TESTS_GPU_HOST_RECORDS_H_

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/executors/update_executor.h"
#include "storage/record_view.h"

namespace optstate {

// The records of a job on the host: AdamW with states in float32.
class HostRecords final : public scheduler::UpdateTasks {
 public:
  static constexpr size_t kTiles = 64;  // of a record

  // Parameters and gradients have this type; float32 ones are their own
  // masters.
  HostRecords(DType dtype, size_t records)
      : numel_(records * kTiles * kTileElements),
        layout_(LayoutOf(dtype, static_cast<int64_t>(numel_))),
        stamps_(records * kTiles),
        master_(2 * numel_),
        exp_avg_(numel_, 0.01f),
        exp_avg_sq_(numel_, 0.01f) {
    key_.parameter = key_.gradient = dtype;
    key_.master = dtype == DType::kFloat32 ? MasterFormat::kParameter
                                           : MasterFormat::kFloat32;
    if (dtype != DType::kFloat32)
      parameter_.resize(numel_ * SizeInBytes(dtype));
    gradient_.resize(numel_ * SizeInBytes(dtype));
    kernel_ = *kernels::FindUpdateKernel(key_);
    kernels::UpdateInput input;
    input.hyperparams = DefaultHyperparams(key_.optimizer);
    factors_ = kernel_->prepare(input);
  }
  size_t positions() const { return numel_ / kTiles / kTileElements; }
  size_t numel() const { return numel_; }
  // In bfloat16.
  absl::Span<std::byte> parameters() { return absl::MakeSpan(parameter_); }
  SubGroup SubGroupOf(size_t position) const {
    SubGroup sub_group;
    sub_group.begin = position * kTiles * kTileElements;
    sub_group.end = sub_group.begin + kTiles * kTileElements;
    sub_group.end_parameter = 1;
    return sub_group;
  }
  // Returns the record of a sub-group.
  storage::RecordView RecordOf(const SubGroup* sub_group) {
    storage::RecordView::Bases bases;
    bases.parameter_area = parameter_.empty()
                               ? reinterpret_cast<std::byte*>(master_.data())
                               : parameter_.data();
    const auto place = [&](int part, std::vector<float>* array) {
      bases.parts[static_cast<size_t>(part)] =
          reinterpret_cast<std::byte*>(array->data() + sub_group->begin);
    };
    place(storage::kMasterPart, &master_);
    place(storage::kStatePart0, &exp_avg_);
    place(storage::kStatePart0 + 1, &exp_avg_sq_);
    return {&layout_, sub_group, bases};
  }
  // The passes from here on are of the next step.
  void NextStep() { ++step_; }

  absl::Status Open(size_t slot, size_t position) override {
    positions_[slot] = position;
    return absl::OkStatus();
  }
  void ForEachTask(
      size_t slot,
      absl::FunctionRef<void(scheduler::UpdateTask&)> visit) override {
    for (size_t i = 0; i < kTiles; ++i) {
      const size_t run = positions_[slot] * kTiles + i;
      const size_t begin = run * kTileElements;
      const size_t bytes = SizeInBytes(key_.parameter);
      const void* const gradients[] = {gradient_.data() + begin * bytes};
      scheduler::UpdateTask task;
      task.record = positions_[slot];
      task.run = run;
      task.step = step_;
      task.view.gradients = gradients;
      task.view.master = master_.data() + begin;
      task.view.parameter = parameter_.empty()
                                ? task.view.master
                                : parameter_.data() + begin * bytes;
      task.view.state[0] = exp_avg_.data() + begin;
      task.view.state[1] = exp_avg_sq_.data() + begin;
      task.view.numel = kTileElements;
      task.view.flat_begin = begin;
      task.key = &key_;
      task.kernel = kernel_;
      task.factors = &factors_;
      task.stamp = &stamps_[run];
      visit(task);
    }
  }
  void Close(size_t /*slot*/) override {}

 private:
  static Layout LayoutOf(DType dtype, int64_t numel) {
    LayoutSpec spec;
    spec.groups.resize(1);
    ParameterSpec& parameter = spec.parameters.emplace_back();
    parameter.name = "weights";
    parameter.shape = {numel};
    parameter.numel = numel;
    parameter.dtype = parameter.gradient_dtype = dtype;
    return *Layout::Make(std::move(spec));
  }

  kernels::UpdateKernelKey key_;
  const size_t numel_;
  const Layout layout_;
  const kernels::UpdateKernel* kernel_ = nullptr;
  kernels::UpdateFactors factors_;
  std::vector<std::atomic<uint64_t>> stamps_;
  std::vector<float> master_, exp_avg_, exp_avg_sq_;
  std::vector<std::byte> parameter_, gradient_;
  size_t positions_[256] = {};
  uint64_t step_ = 1;
};

// Memory that the device can read, as a job's file is.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(bytes) {
    void* const pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(pages);
    std::memset(data_, 0, bytes);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { ::munmap(data_, bytes_); }
  absl::Span<std::byte> all() const { return {data_, bytes_}; }

 private:
  const size_t bytes_;
  std::byte* data_;
};

}  // namespace optstate

#endif  // OPTSTATE_TESTS_GPU_HOST_RECORDS_H_
