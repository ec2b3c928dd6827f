#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENT_BATCH_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENT_BATCH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/executors/batch_memory.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/resident_records.h"
#include "server/scheduler/executors/shared_gradients.h"
#include "server/scheduler/executors/update_batch.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/gradient_log.h"
#include "server/scheduler/worker_undo.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// A batch of records that stay on the device: their gradients are copied there
// from the log, which has them next to each other as a rule, and their
// parameters back, and to where ranks on the device get them, if they do. A
// record that is not there yet is copied to its place first.
//
// A gradient that its rank has on the device is copied there from that memory
// instead. The log has it all the same: the digest of the copy, which the
// device computes, has to be that of the log's bytes, or else the CPU does the
// task.
//
// The memory of the host and that of the device begin alike:
//   [tasks | factors | addresses of gradients | tasks of digests | digests |
//    parameters]
// Behind that the host has room for records on their way to their places, and
// the device for gradients. Parameters have the order of masters in the
// records' places, so that both are copied in few pieces.
//
// Threads: as UpdateBatch. Allocates in Make() alone.
// Size: one method for each call of UpdateBatch, and for each kind of copy that
// a batch has.
class ResidentBatch final : public UpdateBatch {
 public:
  static constexpr size_t kTilesMax = 4096;

  // Takes memory for so many bytes of parameters, and as many of gradients.
  // The others outlive the batch. RESOURCE_EXHAUSTED: the device lacks memory;
  // other errors are those of the device.
  static absl::StatusOr<std::unique_ptr<ResidentBatch>> Make(
      accelerator::Device* device, ResidentRecords* records,
      const SharedGradients* gradients, uint64_t bytes);
  // Returns the memory of the host that it takes.
  static uint64_t HostBytes(uint64_t bytes);
  ResidentBatch(const ResidentBatch&) = delete;
  ResidentBatch& operator=(const ResidentBatch&) = delete;

  // `tile` is not null.
  bool Add(size_t slot, const UpdateTask& task, ResidentTile* tile) override;
  size_t size() const override { return tiles_.size(); }
  uint64_t run(size_t i) const override { return tiles_[i].tile->run; }
  uint64_t step() const override { return step_; }
  uint64_t elements() const override { return elements_; }
  uint64_t bytes() const override { return HostBytes(bytes_); }
  uint64_t bytes_to_device() const override;
  uint64_t bytes_to_host() const override;
  uint64_t bytes_there() const override { return bytes_there_; }
  uint64_t refused_elements() const override {
    return refused_elements_.load(std::memory_order_relaxed);
  }

  uint64_t left_elements() const override {
    return left_elements_.load(std::memory_order_relaxed);
  }

  void Gather(size_t i, WorkerUndo* undo) override;
  void SetTimed(bool is_timed) override { memory_->SetTimed(is_timed); }
  std::optional<BatchTimes> Times() const override { return memory_->Times(); }
  absl::Status Submit(const DeviceKernels& kernels) override;
  absl::Status Wait() override { return memory_->Wait(); }
  absl::Status Drain() override { return memory_->stream()->Wait(); }
  bool WriteBack(size_t i, WorkerUndo* undo) override;
  // The record in host memory is brought up to date first.
  bool UpdateByCpu(size_t i, WorkerUndo* undo) override;
  void Clear() override;

 private:
  struct Tile {
    ResidentTile* tile;
    // The gradients of ranks, among those of the batch.
    size_t first_gradient;
    size_t gradients;
    // The addresses in host memory; without a record that of the parameter.
    kernels::TileView host;
    bool has_record;
    uint32_t factors;  // its place among those of the batch
    // Offset of the new one in both memories; in the host's for tiles that are
    // not direct.
    uint64_t parameter_at;
    // Offset, among the gradients of the device, of its entry, or, when a rank
    // has it there, of the gradient.
    uint64_t gradient_at;
    // Offset of the record on its way to its place; kIsThere: it is there.
    uint64_t record_at;
    const GradientLog::Entry* entry;  // once it is gathered
    // Where its rank has the gradient on the device; null: the log's is copied.
    accelerator::DeviceAddress there;
    uint32_t digest;      // its place among those of the batch
    uint64_t log_digest;  // of the log's gradient, once it is gathered
    // The device copies the parameter to its place in host memory.
    bool is_direct;
  };
  static constexpr uint64_t kIsThere = ~uint64_t{0};

  ResidentBatch(std::unique_ptr<BatchMemory> memory, ResidentRecords* records,
                const SharedGradients* gradients, uint64_t bytes);
  std::byte* HostAt(uint64_t offset) const { return memory_->HostAt(offset); }
  absl::Span<const void* const> GradientsOf(const Tile& tile) const {
    return absl::MakeConstSpan(gradient_addresses_)
        .subspan(tile.first_gradient, tile.gradients);
  }
  template <typename T>
  T* DeviceAt(uint64_t offset) const {
    return (memory_->device() + offset).ForKernel<T>();
  }
  // Returns the place of the factors, which are added if they are new.
  uint32_t AddFactors(const kernels::UpdateFactors& factors);
  kernels::UpdateFactors* factors() const;
  // Calls visit(from, offset, to, bytes) for each array of the record on its
  // way.
  template <typename Visit>
  absl::Status ForEachArray(const Tile& tile, const Visit& visit) const;
  absl::Status CopyGradients();
  absl::Status CopyGradientsThere();
  // Returns whether the device has updated the tile with the log's gradient.
  bool HasGradientOfLog(const Tile& tile) const;
  absl::Status CopyRecords();
  absl::Status CopyParametersBack();
  absl::Status CopyParametersToRanks();
  // Returns where the device has the new parameter of a tile, and its bytes.
  accelerator::DeviceAddress NewParameter(const Tile& tile) const;
  static uint64_t ParameterBytes(const Tile& tile);
  // Returns where the host gets it, and without the room behind it.
  std::byte* HostPlace(const Tile& tile) const;
  static uint64_t HostParameterBytes(const Tile& tile);
  // Decides which parameters the device copies to their places itself.
  void ChooseDirect();
  // Returns the end of the tiles from `begin` on that are copied back together.
  size_t EndOfNeighbours(size_t begin) const;

  ResidentRecords& records_;
  const SharedGradients& gradients_;
  const uint64_t bytes_;
  const uint64_t records_offset_;  // behind the parameters
  const std::unique_ptr<BatchMemory> memory_;
  std::vector<Tile> tiles_;
  std::vector<const void*> gradient_addresses_;
  kernels::UpdateKernelKey key_;  // of the first
  uint64_t step_ = 0;
  uint64_t elements_ = 0;
  uint32_t factors_ = 0;  // how many
  uint64_t parameters_end_ = 0;
  uint64_t gradients_end_ = 0;
  uint64_t records_end_ = 0;
  uint32_t digests_ = 0;  // tiles whose gradient a rank has there
  uint64_t bytes_there_ = 0;
  uint64_t device_only_bytes_ = 0;  // of gradients_end_, not copied to there
  std::atomic<uint64_t> refused_elements_{0};
  std::atomic<uint64_t> left_elements_{0};
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENT_BATCH_H_
