#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/cuda/digest.h"
#include "kernels/cuda/serial_launch.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/cuda/whole_task.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/executors/device_kernels.h"
#include "storage/accelerator/emulated_stream.h"

namespace optstate::scheduler {
namespace {

using accelerator::EmulatedMemory;
using kernels::cuda::DigestTask;
using kernels::cuda::SerialBlock;
using kernels::cuda::TileTask;
using kernels::cuda::WholeTask;

struct UpdateArguments {
  OptimizerKind kind;
  uint32_t options;
  const TileTask* tasks;
  uint32_t count;
  const kernels::UpdateFactors* factors;
};

struct WholeArguments {
  OptimizerKind kind;
  const WholeTask* tasks;
  uint32_t count;
  uint32_t rounds;
};

struct DigestArguments {
  const DigestTask* tasks;
  uint32_t count;
  uint64_t* digests;
};

// The device's addresses of a task, found in the memory that emulates it.
// Remembers the first one that is not the device's.
class Addresses {
 public:
  explicit Addresses(const EmulatedMemory* memory) : memory_(*memory) {}

  bool all_found() const { return all_found_; }

  // Null stays null.
  template <typename T>
  T* Find(T* address, uint64_t bytes) {
    if (address == nullptr) return nullptr;
    T* const found = memory_.Find(address, bytes);
    all_found_ &= found != nullptr;
    return found;
  }

  // Returns a task with addresses that can be followed. `gradients` keeps those
  // of its gradients.
  TileTask Translate(TileTask task, std::vector<const void*>* gradients) {
    auto& tile = task.tile;
    const uint64_t numel = task.numel;
    tile.parameter = Find(static_cast<std::byte*>(tile.parameter),
                          numel * SizeInBytes(tile.parameter_dtype));
    const uint64_t master_bytes =
        kernels::scalar::BytesOfMaster(tile.master_format);
    tile.master =
        Find(static_cast<std::byte*>(tile.master), numel * master_bytes);
    const uint64_t blocks =
        (numel + kQuantizedBlockElements - 1) / kQuantizedBlockElements;
    for (int k = 0; k < kStateArraysMax; ++k) {
      tile.state[k] = Find(static_cast<std::byte*>(tile.state[k]),
                           numel * SizeInBytes(tile.state_format));
      tile.scale[k] = Find(tile.scale[k], blocks * sizeof(float));
    }
    TranslateGradients(numel, &tile.gradient, gradients);
    return task;
  }

  WholeTask Translate(WholeTask task) {
    const uint64_t bytes = task.numel * sizeof(float);
    task.gradient = Find(task.gradient, bytes);
    task.master = Find(task.master, bytes);
    // With means the states are variances of rows and of columns.
    const bool is_factored = task.means != nullptr;
    const uint64_t factored[] = {task.all_rows, task.all_columns};
    for (int k = 0; k < kStateArraysMax; ++k) {
      task.state[k] =
          Find(task.state[k],
               is_factored && k < 2 ? factored[k] * sizeof(float) : bytes);
    }
    if (is_factored) {
      const uint64_t matrices = task.all_columns / task.columns;
      task.means = Find(task.means, matrices * sizeof(double));
    }
    const uint64_t grams = 2 * task.rows * task.rows;
    task.scratch = Find(task.scratch, bytes + grams * sizeof(float));
    task.descent = Find(task.descent, sizeof(*task.descent));
    return task;
  }

 private:
  template <typename Gradient>
  void TranslateGradients(uint64_t numel, Gradient* gradient,
                          std::vector<const void*>* found) {
    found->clear();
    const void* const* const table =
        Find(gradient->gradients, gradient->count * sizeof(void*));
    if (table == nullptr) return;
    const uint64_t bytes =
        (gradient->begin + numel) * SizeInBytes(gradient->dtype);
    for (size_t i = 0; i < gradient->count; ++i) {
      found->push_back(Find(static_cast<const std::byte*>(table[i]), bytes));
    }
    gradient->gradients = found->data();
  }

  const EmulatedMemory& memory_;
  bool all_found_ = true;
};

absl::Status IllegalAddress(uint32_t task) {
  return absl::InternalError(absl::StrCat(
      "task ", task, " of a launch has an address that is not the device's"));
}

// Runs on the stream's thread.
absl::Status UpdateTiles(const EmulatedMemory& memory, const void* arguments) {
  const auto& update = *static_cast<const UpdateArguments*>(arguments);
  const TileTask* const tasks =
      memory.Find(update.tasks, update.count * sizeof(TileTask));
  if (tasks == nullptr) return IllegalAddress(0);
  std::vector<const void*> gradients;
  for (uint32_t i = 0; i < update.count; ++i) {
    Addresses addresses(&memory);
    TileTask task = addresses.Translate(tasks[i], &gradients);
    const kernels::UpdateFactors* const factors = addresses.Find(
        update.factors + task.factors, sizeof(kernels::UpdateFactors));
    if (!addresses.all_found()) return IllegalAddress(i);
    task.factors = 0;
    // The order of the threads in a block is any.
    const auto order =
        i % 2 == 0 ? SerialBlock::Order::kUp : SerialBlock::Order::kDown;
    kernels::cuda::UpdateSerially(order, update.kind, update.options,
                                  absl::MakeConstSpan(&task, 1), factors);
  }
  return absl::OkStatus();
}

// Runs on the stream's thread.
absl::Status UpdateParameters(const EmulatedMemory& memory,
                              const void* arguments) {
  const auto& update = *static_cast<const WholeArguments*>(arguments);
  const WholeTask* const tasks =
      memory.Find(update.tasks, update.count * sizeof(WholeTask));
  if (tasks == nullptr) return IllegalAddress(0);
  for (uint32_t i = 0; i < update.count; ++i) {
    Addresses addresses(&memory);
    const WholeTask task = addresses.Translate(tasks[i]);
    if (!addresses.all_found()) return IllegalAddress(i);
    // The order of the threads in a block is any.
    const auto order =
        i % 2 == 0 ? SerialBlock::Order::kUp : SerialBlock::Order::kDown;
    kernels::cuda::UpdateWholeSerially(
        order, update.kind, absl::MakeConstSpan(&task, 1), update.rounds);
  }
  return absl::OkStatus();
}

// Runs on the stream's thread.
absl::Status DigestArrays(const EmulatedMemory& memory, const void* arguments) {
  const auto& digest = *static_cast<const DigestArguments*>(arguments);
  const DigestTask* const tasks =
      memory.Find(digest.tasks, digest.count * sizeof(DigestTask));
  uint64_t* const digests =
      memory.Find(digest.digests, digest.count * sizeof(uint64_t));
  if (tasks == nullptr || digests == nullptr) return IllegalAddress(0);
  for (uint32_t i = 0; i < digest.count; ++i) {
    DigestTask task = tasks[i];
    task.data =
        memory.Find(static_cast<const std::byte*>(task.data), task.bytes);
    if (task.data == nullptr) return IllegalAddress(i);
    // The order of the threads in a block is any.
    const auto order =
        i % 2 == 0 ? SerialBlock::Order::kUp : SerialBlock::Order::kDown;
    digests[i] = kernels::cuda::DigestSerially(order, task);
  }
  return absl::OkStatus();
}

class Emulated final : public DeviceKernels {
 public:
  absl::Status CanUpdate(OptimizerKind kind) const override {
    if (kernels::cuda::UpdateSerially(SerialBlock::Order::kUp, kind,
                                      /*options=*/0, {}, nullptr) ||
        kernels::cuda::UpdateWholeSerially(SerialBlock::Order::kUp, kind, {},
                                           /*rounds=*/0)) {
      return absl::OkStatus();
    }
    return absl::UnimplementedError(absl::StrCat(
        "no device has a kernel of the optimizer ", InfoOf(kind).name,
        ", which needs whole parameters: the CPU alone updates them"));
  }

  absl::Status Update(OptimizerKind kind, uint32_t options,
                      accelerator::DeviceAddress tasks, uint32_t count,
                      accelerator::DeviceAddress factors,
                      accelerator::DeviceStream* stream) const override {
    const UpdateArguments arguments = {
        kind, options, tasks.ForKernel<const TileTask>(), count,
        factors.ForKernel<const kernels::UpdateFactors>()};
    return static_cast<accelerator::EmulatedStream*>(stream->native_handle())
        ->Launch(UpdateTiles, &arguments, sizeof(arguments));
  }

  absl::Status UpdateWhole(OptimizerKind kind, accelerator::DeviceAddress tasks,
                           uint32_t count, uint32_t rounds,
                           accelerator::DeviceStream* stream) const override {
    const WholeArguments arguments = {kind, tasks.ForKernel<const WholeTask>(),
                                      count, rounds};
    return static_cast<accelerator::EmulatedStream*>(stream->native_handle())
        ->Launch(UpdateParameters, &arguments, sizeof(arguments));
  }

  absl::Status Digest(accelerator::DeviceAddress tasks, uint32_t count,
                      accelerator::DeviceAddress digests,
                      accelerator::DeviceStream* stream) const override {
    const DigestArguments arguments = {tasks.ForKernel<const DigestTask>(),
                                       count, digests.ForKernel<uint64_t>()};
    return static_cast<accelerator::EmulatedStream*>(stream->native_handle())
        ->Launch(DigestArrays, &arguments, sizeof(arguments));
  }
};

}  // namespace

const DeviceKernels* EmulatedKernels() {
  static const Emulated kernels;
  return &kernels;
}

}  // namespace optstate::scheduler
