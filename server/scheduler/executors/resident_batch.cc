#include "server/scheduler/executors/resident_batch.h"

#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "kernels/cpu/digest.h"
#include "kernels/cuda/digest.h"
#include "kernels/cuda/tile_task.h"
#include "proto/types/dtype.h"
#include "proto/types/shard.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/executors/cpu_tile.h"

namespace optstate::scheduler {
namespace {

using kernels::cuda::DigestTask;
using kernels::cuda::TileTask;

constexpr uint64_t kFactorsOffset = ResidentBatch::kTilesMax * sizeof(TileTask);
constexpr uint64_t kPointersOffset =
    kFactorsOffset + ResidentBatch::kTilesMax * sizeof(kernels::UpdateFactors);
constexpr uint64_t kDigestTasksOffset =
    kPointersOffset + ResidentBatch::kTilesMax * sizeof(void*);
constexpr uint64_t kDigestsOffset =
    kDigestTasksOffset + ResidentBatch::kTilesMax * sizeof(DigestTask);
constexpr uint64_t kParametersOffset =
    kDigestsOffset + ResidentBatch::kTilesMax * sizeof(uint64_t);
static_assert(kDigestTasksOffset % alignof(DigestTask) == 0);
static_assert(kDigestsOffset % alignof(uint64_t) == 0);
static_assert(kParametersOffset % BatchMemory::kAlignBytes == 0);
// The addresses of the gradients that all tiles may have together.
constexpr size_t kAddressesMax = 8 * ResidentBatch::kTilesMax;
static_assert(kAddressesMax >= kWorldSizeMax);
// Records on their way to their places are few, but for the first step.
constexpr uint64_t kRecordsBytes = uint64_t{8} << 20;

// Returns where the parameters end, and the records or the gradients begin.
uint64_t RecordsOffset(uint64_t bytes) {
  return kParametersOffset + BatchMemory::Aligned(bytes);
}

// Returns the parameter that is a part of the record on the device; null: it is
// none.
accelerator::DeviceAddress ParameterThere(const ResidentTile& tile) {
  const void* there = nullptr;
  if (tile.key.master == MasterFormat::kParameter) {
    there = tile.on_device.master;
  } else if (tile.key.master == MasterFormat::kSplit) {
    there = tile.on_device.parameter;
  }
  return {reinterpret_cast<uint64_t>(there)};
}

}  // namespace

uint64_t ResidentBatch::HostBytes(uint64_t bytes) {
  return RecordsOffset(bytes) + kRecordsBytes;
}

ResidentBatch::ResidentBatch(std::unique_ptr<BatchMemory> memory,
                             ResidentRecords* records,
                             const SharedGradients* gradients, uint64_t bytes)
    : records_(*records),
      gradients_(*gradients),
      bytes_(bytes),
      records_offset_(RecordsOffset(bytes)),
      memory_(std::move(memory)) {
  tiles_.reserve(kTilesMax);
  gradient_addresses_.reserve(kAddressesMax);
  slots_.reserve(kTilesMax);
  Clear();
}

absl::StatusOr<std::unique_ptr<ResidentBatch>> ResidentBatch::Make(
    accelerator::Device* device, ResidentRecords* records,
    const SharedGradients* gradients, uint64_t bytes) {
  bytes = BatchMemory::Aligned(bytes);
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<BatchMemory> memory,
                            BatchMemory::Make(device, HostBytes(bytes),
                                              RecordsOffset(bytes) + bytes));
  return absl::WrapUnique(
      new ResidentBatch(std::move(memory), records, gradients, bytes));
}

void ResidentBatch::Clear() {
  tiles_.clear();
  gradient_addresses_.clear();
  slots_.clear();
  elements_ = 0;
  factors_ = 0;
  digests_ = 0;
  bytes_there_ = 0;
  device_only_bytes_ = 0;
  refused_elements_.store(0, std::memory_order_relaxed);
  left_elements_.store(0, std::memory_order_relaxed);
  parameters_end_ = kParametersOffset;
  gradients_end_ = 0;
  records_end_ = 0;
}

kernels::UpdateFactors* ResidentBatch::factors() const {
  return reinterpret_cast<kernels::UpdateFactors*>(HostAt(kFactorsOffset));
}

uint32_t ResidentBatch::AddFactors(const kernels::UpdateFactors& added) {
  // As a rule all tiles of a group have the same.
  if (factors_ == 0 ||
      std::memcmp(&factors()[factors_ - 1], &added, sizeof(added)) != 0) {
    factors()[factors_++] = added;
  }
  return factors_ - 1;
}

bool ResidentBatch::Add(size_t slot, const UpdateTask& task,
                        ResidentTile* tile) {
  const kernels::UpdateKernelKey& key = tile->key;
  const absl::Span<const void* const> gradients = task.view.gradients;
  if (tiles_.size() == kTilesMax ||
      gradients.size() > kAddressesMax - gradient_addresses_.size() ||
      (!tiles_.empty() &&
       (key.optimizer != key_.optimizer || key.options != key_.options))) {
    return false;
  }
  const uint64_t parameter_bytes =
      BatchMemory::Aligned(task.view.numel * SizeInBytes(key.parameter));
  const uint64_t gradient_bytes = tile->log_bytes.gradient;
  const accelerator::DeviceAddress there = gradients_.Find(
      tile->device, task.parameter, task.step, gradients[0], gradient_bytes);
  const uint64_t entry_bytes = there.is_null()
                                   ? GradientLog::EntryBytes(gradient_bytes)
                                   : BatchMemory::Aligned(gradient_bytes);
  const bool is_there =
      tile->is_resident &&
      tile->device_step == task.stamp->load(std::memory_order_relaxed);
  const uint64_t record_bytes =
      is_there ? 0 : ResidentRecords::RecordBytes(key, task.view);
  if (parameter_bytes > records_offset_ - parameters_end_ ||
      entry_bytes > bytes_ - gradients_end_ ||
      record_bytes > kRecordsBytes - records_end_) {
    return false;
  }
  tiles_.push_back({.tile = tile,
                    .first_gradient = gradient_addresses_.size(),
                    .gradients = gradients.size(),
                    .host = task.view,
                    .has_record = task.has_record,
                    .factors = AddFactors(*task.factors),
                    .parameter_at = parameters_end_,
                    .gradient_at = gradients_end_,
                    .record_at = is_there ? kIsThere : records_end_,
                    .entry = nullptr,
                    .there = there,
                    .digest = digests_,
                    .log_digest = 0,
                    .is_direct = false});
  tiles_.back().host.gradients = {};
  gradient_addresses_.insert(gradient_addresses_.end(), gradients.begin(),
                             gradients.end());
  if (!there.is_null()) {
    ++digests_;
    bytes_there_ += gradient_bytes;
    device_only_bytes_ += entry_bytes;
  }
  parameters_end_ += parameter_bytes;
  gradients_end_ += entry_bytes;
  records_end_ += record_bytes;
  elements_ += task.view.numel;
  key_ = key;
  step_ = task.step;
  NoteSlot(slot);
  return true;
}

template <typename Visit>
absl::Status ResidentBatch::ForEachArray(const Tile& tile,
                                         const Visit& visit) const {
  const ResidentTile& place = *tile.tile;
  uint64_t at = records_offset_ + tile.record_at;
  const auto next = [&](const void* from, void* to, uint64_t bytes) {
    const uint64_t offset = at;
    at += BatchMemory::Aligned(bytes);
    return visit(from, offset, to, bytes);
  };
  const kernels::TileView& host = tile.host;
  const uint64_t numel = host.numel;
  const bool is_split = place.key.master == MasterFormat::kSplit;
  if (is_split) {
    OPTSTATE_RETURN_IF_ERROR(next(host.parameter, place.on_device.parameter,
                                  numel * SizeInBytes(place.key.parameter)));
  }
  OPTSTATE_RETURN_IF_ERROR(next(
      host.master, place.on_device.master,
      numel * (is_split ? SizeInBytes(MasterFormat::kSplit) : sizeof(float))));
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (host.state[k] == nullptr) continue;
    OPTSTATE_RETURN_IF_ERROR(next(host.state[k], place.on_device.state[k],
                                  numel * SizeInBytes(place.key.state)));
    if (place.on_device.scale[k] == nullptr) continue;
    OPTSTATE_RETURN_IF_ERROR(next(host.scale[k], place.on_device.scale[k],
                                  ResidentRecords::BytesOfScales(numel)));
  }
  return absl::OkStatus();
}

void ResidentBatch::Gather(size_t i, WorkerUndo* undo) {
  Tile& tile = tiles_[i];
  ResidentTile& place = *tile.tile;
  const kernels::UpdateFactors& its_factors = factors()[tile.factors];
  records_.Prepare(step_, its_factors, GradientsOf(tile), tile.host, &place,
                   undo);
  tile.entry = &records_.EntryFor(place, step_);
  if (tile.record_at != kIsThere) {
    ForEachArray(tile, [&](const void* from, uint64_t offset, void* /*to*/,
                           uint64_t bytes) {
      std::memcpy(HostAt(offset), from, bytes);
      return absl::OkStatus();
    }).IgnoreError();  // nothing fails
  }
  auto** const pointers =
      reinterpret_cast<const void**>(HostAt(kPointersOffset));
  const uint64_t gradient_at = records_offset_ + tile.gradient_at +
                               (tile.there.is_null() ? sizeof(*tile.entry) : 0);
  pointers[i] = DeviceAt<std::byte>(gradient_at);
  if (!tile.there.is_null()) {
    reinterpret_cast<DigestTask*>(HostAt(kDigestTasksOffset))[tile.digest] = {
        DeviceAt<const void>(gradient_at), place.log_bytes.gradient};
    tile.log_digest = kernels::cpu::DigestOf(tile.entry->gradient(),
                                             place.log_bytes.gradient);
  }
  kernels::TileView view = place.on_device;
  if (place.key.master != MasterFormat::kSplit) {
    view.parameter = DeviceAt<void>(tile.parameter_at);
  }
  view.gradients = {DeviceAt<const void*>(kPointersOffset + i * sizeof(void*)),
                    1};
  view.undo = nullptr;
  reinterpret_cast<TileTask*>(HostAt(0))[i] =
      kernels::cuda::TileTaskOf(place.key, its_factors, view, tile.factors);
}

absl::Status ResidentBatch::Submit(const DeviceKernels& kernels) {
  accelerator::DeviceStream& stream = *memory_->stream();
  const accelerator::DeviceAddress device = memory_->device();
  memory_->Mark(BatchMemory::Point::kBegin);
  OPTSTATE_RETURN_IF_ERROR(CopyGradients());
  if (records_end_ > 0) OPTSTATE_RETURN_IF_ERROR(CopyRecords());
  memory_->Mark(BatchMemory::Point::kCopied);
  if (digests_ > 0) {
    OPTSTATE_RETURN_IF_ERROR(kernels.Digest(device + kDigestTasksOffset,
                                            digests_, device + kDigestsOffset,
                                            &stream));
  }
  OPTSTATE_RETURN_IF_ERROR(kernels.Update(key_.optimizer, key_.options, device,
                                          static_cast<uint32_t>(size()),
                                          device + kFactorsOffset, &stream));
  memory_->Mark(BatchMemory::Point::kComputed);
  OPTSTATE_RETURN_IF_ERROR(CopyParametersToRanks());
  OPTSTATE_RETURN_IF_ERROR(CopyParametersBack());
  if (digests_ > 0) {
    OPTSTATE_RETURN_IF_ERROR(stream.CopyToHost(HostAt(kDigestsOffset),
                                               device + kDigestsOffset,
                                               digests_ * sizeof(uint64_t)));
  }
  return memory_->MarkEnd();
}

absl::Status ResidentBatch::CopyGradients() {
  accelerator::DeviceStream& stream = *memory_->stream();
  const accelerator::DeviceAddress device = memory_->device();
  OPTSTATE_RETURN_IF_ERROR(
      stream.CopyToDevice(device, HostAt(0), tiles_.size() * sizeof(TileTask)));
  OPTSTATE_RETURN_IF_ERROR(
      stream.CopyToDevice(device + kFactorsOffset, HostAt(kFactorsOffset),
                          factors_ * sizeof(kernels::UpdateFactors)));
  OPTSTATE_RETURN_IF_ERROR(stream.CopyToDevice(device + kPointersOffset,
                                               HostAt(kPointersOffset),
                                               tiles_.size() * sizeof(void*)));
  for (size_t i = 0; i < tiles_.size();) {
    if (!tiles_[i].there.is_null()) {
      ++i;
      continue;
    }
    const uint64_t to = tiles_[i].gradient_at;
    const auto* const from =
        reinterpret_cast<const std::byte*>(tiles_[i].entry);
    uint64_t bytes = 0;
    do {
      bytes += GradientLog::EntryBytes(tiles_[i].tile->log_bytes.gradient);
      ++i;
    } while (i < tiles_.size() && tiles_[i].there.is_null() &&
             reinterpret_cast<const std::byte*>(tiles_[i].entry) ==
                 from + bytes);
    OPTSTATE_RETURN_IF_ERROR(
        stream.CopyToDevice(device + (records_offset_ + to), from, bytes));
  }
  return digests_ > 0 ? CopyGradientsThere() : absl::OkStatus();
}

// The rank may write its memory at any time: what is copied here is checked,
// and used, and nothing else.
absl::Status ResidentBatch::CopyGradientsThere() {
  accelerator::DeviceStream& stream = *memory_->stream();
  const accelerator::DeviceAddress device = memory_->device();
  OPTSTATE_RETURN_IF_ERROR(stream.CopyToDevice(device + kDigestTasksOffset,
                                               HostAt(kDigestTasksOffset),
                                               digests_ * sizeof(DigestTask)));
  for (size_t i = 0; i < tiles_.size();) {
    const accelerator::DeviceAddress from = tiles_[i].there;
    if (from.is_null()) {
      ++i;
      continue;
    }
    const uint64_t to = tiles_[i].gradient_at;
    uint64_t bytes = 0;
    do {
      bytes += tiles_[i].tile->log_bytes.gradient;
      ++i;
    } while (i < tiles_.size() && tiles_[i].there == from + bytes &&
             tiles_[i].gradient_at == to + bytes);
    OPTSTATE_RETURN_IF_ERROR(
        stream.CopyOnDevice(device + (records_offset_ + to), from, bytes));
  }
  return absl::OkStatus();
}

bool ResidentBatch::HasGradientOfLog(const Tile& tile) const {
  if (tile.there.is_null()) return true;
  const auto* const digests =
      reinterpret_cast<const uint64_t*>(HostAt(kDigestsOffset));
  return digests[tile.digest] == tile.log_digest;
}

absl::Status ResidentBatch::CopyRecords() {
  accelerator::DeviceStream& stream = *memory_->stream();
  for (const Tile& tile : tiles_) {
    if (tile.record_at == kIsThere) continue;
    OPTSTATE_RETURN_IF_ERROR(ForEachArray(
        tile,
        [&](const void* /*from*/, uint64_t offset, void* to, uint64_t bytes) {
          return stream.CopyToDevice({reinterpret_cast<uint64_t>(to)},
                                     HostAt(offset), bytes);
        }));
  }
  return absl::OkStatus();
}

// Neighbours are copied together.
absl::Status ResidentBatch::CopyParametersBack() {
  ChooseDirect();
  for (size_t i = 0; i < tiles_.size();) {
    const size_t end = EndOfNeighbours(i);
    uint64_t bytes = 0;
    for (size_t k = i; k < end; ++k) bytes += HostParameterBytes(tiles_[k]);
    OPTSTATE_RETURN_IF_ERROR(memory_->stream()->CopyToHost(
        HostPlace(tiles_[i]), NewParameter(tiles_[i]), bytes));
    i = end;
  }
  return absl::OkStatus();
}

void ResidentBatch::ChooseDirect() {
  for (Tile& tile : tiles_) tile.is_direct = tile.tile->can_be_direct;
  for (size_t i = 0; i < tiles_.size();) {
    const size_t end = EndOfNeighbours(i);
    uint64_t bytes = 0;
    for (size_t k = i; k < end; ++k) bytes += HostParameterBytes(tiles_[k]);
    if (bytes < records_.direct_bytes_min()) {
      for (size_t k = i; k < end; ++k) tiles_[k].is_direct = false;
    }
    i = end;
  }
}

size_t ResidentBatch::EndOfNeighbours(size_t begin) const {
  size_t end = begin + 1;
  while (end < tiles_.size()) {
    const Tile& last = tiles_[end - 1];
    const Tile& next = tiles_[end];
    const uint64_t bytes = HostParameterBytes(last);
    if (last.is_direct != next.is_direct ||
        !(NewParameter(next) == NewParameter(last) + bytes) ||
        HostPlace(next) != HostPlace(last) + bytes) {
      break;
    }
    ++end;
  }
  return end;
}

std::byte* ResidentBatch::HostPlace(const Tile& tile) const {
  if (tile.is_direct) return static_cast<std::byte*>(tile.host.parameter);
  return HostAt(tile.parameter_at);
}

uint64_t ResidentBatch::HostParameterBytes(const Tile& tile) {
  return tile.host.numel * SizeInBytes(tile.tile->key.parameter);
}

accelerator::DeviceAddress ResidentBatch::NewParameter(const Tile& tile) const {
  const accelerator::DeviceAddress there = ParameterThere(*tile.tile);
  return there.is_null() ? memory_->device() + tile.parameter_at : there;
}

uint64_t ResidentBatch::ParameterBytes(const Tile& tile) {
  return BatchMemory::Aligned(HostParameterBytes(tile));
}

// Nothing reads what is copied here but ranks: see SharedParameters.
absl::Status ResidentBatch::CopyParametersToRanks() {
  static_assert(BatchMemory::kAlignBytes == SharedParameters::kAlignBytes);
  for (size_t i = 0; i < tiles_.size();) {
    const ResidentTile& first = *tiles_[i].tile;
    if (!first.is_shared()) {
      ++i;
      continue;
    }
    const accelerator::DeviceAddress from = NewParameter(tiles_[i]);
    const accelerator::DeviceAddress to = records_.SharedAddress(first);
    uint64_t bytes = 0;
    const auto follows = [&](const Tile& tile) {
      return tile.tile->is_shared() &&
             ParameterThere(*tile.tile).is_null() ==
                 ParameterThere(first).is_null() &&
             NewParameter(tile) == from + bytes &&
             records_.SharedAddress(*tile.tile) == to + bytes;
    };
    do {
      bytes += ParameterBytes(tiles_[i]);
      ++i;
    } while (i < tiles_.size() && follows(tiles_[i]));
    OPTSTATE_RETURN_IF_ERROR(memory_->stream()->CopyOnDevice(to, from, bytes));
  }
  return absl::OkStatus();
}

uint64_t ResidentBatch::bytes_to_host() const {
  return parameters_end_ - kParametersOffset;
}

uint64_t ResidentBatch::bytes_to_device() const {
  return tiles_.size() * (sizeof(TileTask) + sizeof(void*)) +
         factors_ * sizeof(kernels::UpdateFactors) + gradients_end_ -
         device_only_bytes_ + digests_ * sizeof(DigestTask) + records_end_;
}

bool ResidentBatch::WriteBack(size_t i, WorkerUndo* undo) {
  const Tile& tile = tiles_[i];
  ResidentTile& place = *tile.tile;
  if (!HasGradientOfLog(tile)) {
    gradients_.Distrust(GradientsOf(tile)[0]);
    if (!UpdateByCpu(i, undo)) return false;
    refused_elements_.fetch_add(tile.host.numel, std::memory_order_relaxed);
    return true;
  }
  if (!tile.is_direct) {
    std::memcpy(tile.host.parameter, HostAt(tile.parameter_at),
                HostParameterBytes(tile));
  }
  place.device_step = step_;
  records_.NoteShared(place, step_);
  // Release: ranks that see it read the parameter's new values.
  place.stamp->store(step_, std::memory_order_release);
  return true;
}

bool ResidentBatch::UpdateByCpu(size_t i, WorkerUndo* undo) {
  const Tile& tile = tiles_[i];
  ResidentTile& place = *tile.tile;
  if (!tile.has_record) {
    // The device may have done a part of it, with another gradient too.
    place.device_step = ResidentTile::kNoStep;
    left_elements_.fetch_add(tile.host.numel, std::memory_order_relaxed);
    return false;
  }
  records_.Settle(tile.host, &place, undo);
  UpdateTask task;
  task.run = place.run;
  task.step = step_;
  task.view = tile.host;
  task.view.gradients = GradientsOf(tile);
  task.kernel = place.kernel_of_ranks;
  task.factors = &factors()[tile.factors];
  task.stamp = place.stamp;
  UpdateOnCpu(task, undo);
  return true;
}

}  // namespace optstate::scheduler
