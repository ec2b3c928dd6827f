#include "server/scheduler/executors/resident_records.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/cast.h"
#include "kernels/scalar/element_update.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "server/scheduler/tile_view.h"
#include "spdlog/spdlog.h"
#include "storage/state_scales.h"

namespace optstate::scheduler {
namespace {

// Kernels load vectors of this size.
constexpr uint64_t kAlignBytes = 16;

uint64_t Aligned(uint64_t bytes) {
  return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
}

}  // namespace

uint64_t ResidentRecords::BytesOfScales(uint64_t numel) {
  return (numel + kQuantizedBlockElements - 1) / kQuantizedBlockElements *
         sizeof(float);
}

absl::StatusOr<std::unique_ptr<ResidentRecords>> ResidentRecords::Make(
    absl::Span<accelerator::Device* const> devices, uint64_t device_bytes,
    uint64_t turn_elements, const Host& host) {
  std::unique_ptr<ResidentRecords> made(new ResidentRecords);
  made->turn_elements_ = turn_elements;
  made->host_ = host;
  made->log_ = GradientLog(host.log);
  made->log_.Begin(host.room, host.content);
  for (accelerator::Device* const device : devices) {
    Place& place = made->places_.emplace_back();
    if (device == nullptr) continue;
    place.device = device;
    OPTSTATE_RETURN_IF_ERROR(made->Register(&place));
    OPTSTATE_ASSIGN_OR_RETURN(place.memory,
                              device->Allocate(Aligned(device_bytes)));
    place.room = Aligned(device_bytes);
  }
  return made;
}

absl::Status ResidentRecords::Register(Place* place) {
  OPTSTATE_RETURN_IF_ERROR(place->device->RegisterHost(host_.log));
  place->is_log_registered = true;
  if (host_.parameters.empty()) return absl::OkStatus();
  const absl::Status registered = place->device->RegisterHost(host_.parameters);
  place->are_parameters_registered = registered.ok();
  if (!registered.ok()) {
    observe::LogRepeated(
        spdlog::level::warn, "parameters through a buffer",
        place->device->info().name,
        "parameters come from a device through a buffer, which workers copy: "
        "device={} error=\"{}\"",
        place->device->info().name, registered.ToString());
  }
  return absl::OkStatus();
}

ResidentRecords::~ResidentRecords() {
  for (Place& place : places_) {
    if (!place.memory.is_null()) place.device->Free(place.memory);
    if (place.is_log_registered) {
      place.device->UnregisterHost(host_.log.data());
    }
    if (place.are_parameters_registered) {
      place.device->UnregisterHost(host_.parameters.data());
    }
  }
}

bool ResidentRecords::CanStay(const UpdateTask& task) const {
  return task.undo == UndoPolicy::kInPlace &&
         (task.view.gradients.size() == 1 ||
          host_.content == GradientLog::Content::kSum);
}

uint64_t ResidentRecords::RecordBytes(const kernels::UpdateKernelKey& key,
                                      const kernels::TileView& view) {
  uint64_t bytes =
      key.master == MasterFormat::kSplit
          ? Aligned(view.numel * SizeInBytes(key.parameter)) +
                Aligned(view.numel * SizeInBytes(MasterFormat::kSplit))
          : Aligned(view.numel * sizeof(float));
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (view.state[k] == nullptr) continue;
    bytes += Aligned(view.numel * SizeInBytes(key.state));
    if (storage::HasScales(key.state)) {
      bytes += Aligned(BytesOfScales(view.numel));
    }
  }
  return bytes;
}

ResidentTile* ResidentRecords::Find(uint64_t run) {
  if (run >= by_run_.size() || by_run_[run] == 0) return nullptr;
  return &tiles_[by_run_[run] - 1];
}

ResidentRecords::Place* ResidentRecords::PlaceWithRoom(uint64_t flat_begin,
                                                       uint64_t bytes) {
  const uint64_t turn = flat_begin / turn_elements_;
  if (turn == turn_ && bytes <= places_[turn_device_].free()) {
    return &places_[turn_device_];
  }
  const auto most = std::max_element(
      places_.begin(), places_.end(),
      [](const Place& a, const Place& b) { return a.free() < b.free(); });
  if (bytes > most->free()) return nullptr;
  turn_ = turn;
  turn_device_ = static_cast<size_t>(most - places_.begin());
  return &*most;
}

bool ResidentRecords::CanBeDirect(const Place& place, const void* parameter,
                                  uint64_t bytes) const {
  // In numbers: pointers into different arrays have no order.
  const auto begin = reinterpret_cast<uintptr_t>(host_.parameters.data());
  const auto at = reinterpret_cast<uintptr_t>(parameter);
  const uint64_t size = host_.parameters.size();
  return place.are_parameters_registered && at >= begin && at - begin <= size &&
         bytes <= size - (at - begin);
}

GradientLog::TileBytes ResidentRecords::LogBytesOf(
    const UpdateTask& task) const {
  const bool is_sum = host_.content == GradientLog::Content::kSum;
  const kernels::UpdateKernelKey& key = is_sum ? *task.sum_key : *task.key;
  GradientLog::TileBytes bytes;
  bytes.gradient = task.view.numel * SizeInBytes(key.gradient);
  if (key.master != MasterFormat::kFloat32) {
    bytes.parameter = task.view.numel * SizeInBytes(key.parameter);
  }
  return bytes;
}

bool ResidentRecords::HasRoomFor(const UpdateTask& task) const {
  if (!CanStay(task)) return false;
  const uint64_t bytes = RecordBytes(*task.key, task.view);
  if (!log_.HasRoomFor(LogBytesOf(task))) return false;
  return std::any_of(places_.begin(), places_.end(),
                     [&](const Place& place) { return bytes <= place.free(); });
}

ResidentTile* ResidentRecords::Admit(const UpdateTask& task) {
  if (!CanStay(task)) return nullptr;
  const bool is_sum = host_.content == GradientLog::Content::kSum;
  const kernels::UpdateKernelKey& key = is_sum ? *task.sum_key : *task.key;
  const GradientLog::TileBytes log_bytes = LogBytesOf(task);
  Place* const place =
      PlaceWithRoom(task.view.flat_begin, RecordBytes(key, task.view));
  if (place == nullptr || !log_.AddTile(task.run, log_bytes)) return nullptr;
  ResidentTile& tile = tiles_.emplace_back();
  tile.number = tiles_.size() - 1;
  tile.run = task.run;
  tile.parameter = task.parameter;
  tile.record = task.record;
  tile.device = static_cast<size_t>(place - places_.data());
  tile.key = key;
  tile.kernel = is_sum ? task.sum_kernel : task.kernel;
  tile.kernel_of_ranks = task.kernel;
  tile.rank_dtype = task.key->gradient;
  tile.stamp = task.stamp;
  tile.log_bytes = log_bytes;
  tile.can_be_direct =
      key.master == MasterFormat::kFloat32 &&
      CanBeDirect(*place, task.view.parameter,
                  task.view.numel * SizeInBytes(key.parameter));
  TakePlace(task.view, place, &tile);
  SharePlace(&tile);
  if (by_run_.size() <= task.run) by_run_.resize(task.run + 1, 0);
  by_run_[task.run] = static_cast<uint32_t>(tile.number + 1);
  by_element_[task.view.flat_begin] = &tile;
  return &tile;
}

void ResidentRecords::TakePlace(const kernels::TileView& host, Place* place,
                                ResidentTile* tile) const {
  const uint64_t numel = host.numel;
  kernels::TileView& view = tile->on_device;
  view = host;
  view.gradients = {};
  const auto take_front = [place](uint64_t bytes) {
    const uint64_t at = place->masters;
    place->masters += Aligned(bytes);
    return (place->memory + at).ForKernel<void>();
  };
  const auto take = [place](uint64_t bytes) {
    place->states += Aligned(bytes);
    return (place->memory + (place->room - place->states)).ForKernel<void>();
  };
  if (tile->key.master == MasterFormat::kSplit) {
    view.parameter = take_front(numel * SizeInBytes(tile->key.parameter));
    view.master = take(numel * SizeInBytes(MasterFormat::kSplit));
  } else {
    view.parameter = nullptr;
    view.master = take_front(numel * sizeof(float));
  }
  for (int k = 0; k < kStateArraysMax; ++k) {
    view.scale[k] = nullptr;
    if (host.state[k] == nullptr) continue;
    view.state[k] = take(numel * SizeInBytes(tile->key.state));
    if (!storage::HasScales(tile->key.state)) continue;
    view.scale[k] = static_cast<float*>(take(BytesOfScales(numel)));
  }
  place->elements += numel;
}

absl::StatusOr<DeviceParameters> ResidentRecords::ShareParameters(
    size_t device, uint64_t bytes, uint64_t run_count) {
  if (shared_ == nullptr) {
    std::vector<accelerator::Device*> devices;
    for (const Place& place : places_) devices.push_back(place.device);
    OPTSTATE_ASSIGN_OR_RETURN(shared_,
                              SharedParameters::Make(devices, run_count));
  }
  if (shared_->is_open(device)) return shared_->Export(device);
  OPTSTATE_RETURN_IF_ERROR(shared_->Open(device, bytes));
  absl::StatusOr<DeviceParameters> exported = shared_->Export(device);
  if (!exported.ok()) {
    shared_->Close(device);
    return exported;
  }
  for (ResidentTile& tile : tiles_) {
    if (tile.device == device) SharePlace(&tile);
  }
  return exported;
}

void ResidentRecords::SharePlace(ResidentTile* tile) {
  if (shared_ == nullptr) return;
  tile->shared_at =
      shared_->AddPlace(tile->device, tile->run,
                        tile->numel() * SizeInBytes(tile->key.parameter));
}

bool ResidentRecords::Lags(const ResidentTile& tile) const {
  return log_.applied(tile.number).load(std::memory_order_relaxed) !=
         tile.stamp->load(std::memory_order_relaxed);
}

void ResidentRecords::CatchUp(const kernels::TileView& host, ResidentTile* tile,
                              WorkerUndo* undo) {
  const uint64_t stamp = tile->stamp->load(std::memory_order_relaxed);
  const uint64_t has =
      Replay(log_, tile->number, stamp, *tile->kernel, host, undo);
  if (has == stamp) return;
  // The next engine says so to whoever asks.
  spdlog::critical("gradient_log: run={} lacks a step between {} and {}",
                   tile->run, has, stamp);
  std::abort();
}

bool ResidentRecords::NeedsRecord(const ResidentTile& tile,
                                  uint64_t step) const {
  return !tile.is_resident ||
         tile.device_step != tile.stamp->load(std::memory_order_relaxed) ||
         IsDue(tile, step) ||
         // The log has no room for the step yet.
         log_.EntryFor(tile.number, step).step.load() >
             log_.applied(tile.number).load();
}

void ResidentRecords::Prepare(uint64_t step,
                              const kernels::UpdateFactors& factors,
                              absl::Span<const void* const> gradients,
                              const kernels::TileView& host, ResidentTile* tile,
                              WorkerUndo* undo) {
  if (!tile->is_resident) {
    log_.MarkResident(tile->number,
                      tile->stamp->load(std::memory_order_relaxed),
                      host.parameter, tile->log_bytes);
    tile->is_resident = true;
  } else if (NeedsRecord(*tile, step)) {
    CatchUp(host, tile, undo);
  }
  log_.Write(tile->number, step, factors, [&](std::byte* to) {
    if (host_.content == GradientLog::Content::kGradient) {
      std::memcpy(to, gradients[0], tile->log_bytes.gradient);
      return;
    }
    kernels::Accumulate(tile->rank_dtype, gradients, /*first=*/true,
                        reinterpret_cast<float*>(to), tile->numel());
  });
  MarkStale(*tile);
}

void ResidentRecords::Settle(const kernels::TileView& host, ResidentTile* tile,
                             WorkerUndo* undo) {
  if (!tile->is_resident) return;
  CatchUp(host, tile, undo);
  // Whoever settled it may change the parameter in host memory.
  MarkStale(*tile);
  log_.MarkSettled(tile->number);
  tile->is_resident = false;
}

void ResidentRecords::Drop() {
  for (ResidentTile& tile : tiles_) {
    if (!tile.is_resident) continue;
    MarkStale(tile);
    log_.MarkSettled(tile.number);
    tile.is_resident = false;
  }
}

bool ResidentRecords::AreSettled() const {
  return std::none_of(
      tiles_.begin(), tiles_.end(),
      [](const ResidentTile& tile) { return tile.is_resident; });
}

void ResidentRecords::Forget() {
  // Earlier builds know no log of sums, and may be the next to look at it.
  log_.Begin({});
  shared_.reset();
  by_element_.clear();
  by_run_.clear();
  tiles_.clear();
}

template <typename Visit>
void ResidentRecords::ForEachResidentIn(const SubGroup& sub_group,
                                        const Visit& visit) const {
  for (auto it = by_element_.lower_bound(sub_group.begin);
       it != by_element_.end() && it->first < sub_group.end; ++it) {
    if (it->second->is_resident) visit(it->second);
  }
}

bool ResidentRecords::Concerns(const SubGroup& sub_group, bool is_written) {
  const absl::MutexLock lock(&MutexOf(sub_group));
  bool concerns = false;
  ForEachResidentIn(sub_group, [&](const ResidentTile* tile) {
    concerns = concerns || is_written || Lags(*tile);
  });
  return concerns;
}

void ResidentRecords::MakeCurrent(const storage::RecordView& record,
                                  bool is_written, WorkerUndo* undo) {
  const absl::MutexLock lock(&MutexOf(record.sub_group()));
  const Layout& layout = record.layout();
  ForEachResidentIn(record.sub_group(), [&](ResidentTile* tile) {
    const uint64_t begin =
        tile->on_device.flat_begin - layout.flat_offset(tile->parameter);
    const kernels::TileView host =
        TileViewOf(layout, record, tile->parameter, begin, tile->numel());
    if (is_written) {
      Settle(host, tile, undo);
    } else {
      CatchUp(host, tile, undo);
    }
  });
}

bool ResidentRecords::IsDue(const SubGroup& sub_group) {
  const absl::MutexLock lock(&MutexOf(sub_group));
  bool is_due = false;
  ForEachResidentIn(sub_group, [&](const ResidentTile* tile) {
    is_due = is_due || (IsDue(*tile, tile->stamp->load() + 1) && Lags(*tile));
  });
  return is_due;
}

}  // namespace optstate::scheduler
