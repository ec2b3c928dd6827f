#include "server/scheduler/executors/shared_gradients.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "spdlog/spdlog.h"

namespace optstate::scheduler {

namespace {

// Kernels load so many bytes at once.
constexpr uint64_t kAlignBytes = 16;

}  // namespace

SharedGradients::~SharedGradients() {
  while (!ranks_.empty()) Unmap(ranks_.back()->rank);
}

absl::Status SharedGradients::CheckTable(const shm::PeerSegment& table,
                                         uint64_t parameter_count) {
  // Copied once: the rank may write meanwhile.
  const auto& header =
      *reinterpret_cast<const shm::DeviceGradientsHeader*>(table.data());
  const uint64_t magic = header.magic;
  const uint32_t version = header.version;
  const uint64_t count = header.parameter_count;
  if (magic != shm::kDeviceGradientsMagic) {
    return absl::InvalidArgumentError(
        "the table of gradients on a device has a wrong magic number");
  }
  if (version != shm::kDeviceGradientsVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("the table of gradients on a device has version ", version,
                     "; this engine reads ", shm::kDeviceGradientsVersion));
  }
  if (count != parameter_count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the table of gradients on a device has ", count,
        " parameters, and the job's layout has ", parameter_count));
  }
  return absl::OkStatus();
}

absl::Status SharedGradients::Map(Shared shared,
                                  const RankPartition& partition) {
  Unmap(shared.rank);
  auto rank = std::make_unique<Rank>();
  rank->rank = shared.rank;
  rank->device = shared.device;
  rank->device_index = shared.device_index;
  rank->memory_bytes = shared.memory.bytes;
  rank->parameter_count = shared.parameter_count;
  rank->area = shared.area;
  rank->partition = partition;
  OPTSTATE_ASSIGN_OR_RETURN(
      rank->table,
      shm::PeerSegment::Map(std::move(shared.table),
                            shm::DeviceGradientsBytes(shared.parameter_count)));
  OPTSTATE_RETURN_IF_ERROR(CheckTable(rank->table, shared.parameter_count));
  OPTSTATE_ASSIGN_OR_RETURN(rank->memory, rank->device->Import(shared.memory));
  ranks_.push_back(std::move(rank));
  return absl::OkStatus();
}

void SharedGradients::Unmap(uint32_t rank) {
  const auto found =
      std::find_if(ranks_.begin(), ranks_.end(),
                   [rank](const auto& each) { return each->rank == rank; });
  if (found == ranks_.end()) return;
  (*found)->device->Free((*found)->memory);
  ranks_.erase(found);
}

accelerator::DeviceAddress SharedGradients::Find(size_t device_index,
                                                 uint32_t parameter,
                                                 uint64_t step,
                                                 const void* gradient,
                                                 uint64_t bytes) const {
  constexpr accelerator::DeviceAddress kNowhere;
  for (const auto& rank : ranks_) {
    if (rank->device_index != device_index || !rank->HasInArea(gradient)) {
      continue;
    }
    if (parameter >= rank->parameter_count || rank->is_distrusted.load()) {
      return kNowhere;
    }
    const shm::DeviceGradient& entry = rank->entry(parameter);
    // A gradient of another step, or one that is being written.
    if (entry.step.load(std::memory_order_acquire) != step) return kNowhere;
    const uint64_t place = entry.place.load(std::memory_order_relaxed);
    const std::vector<Piece>& pieces = rank->partition.pieces;
    const size_t i = rank->partition.LowerBound(parameter);
    if (i == pieces.size() || pieces[i].parameter != parameter) return kNowhere;
    const auto in_area = static_cast<uint64_t>(
        static_cast<const std::byte*>(gradient) - rank->area);
    const uint64_t in_piece = in_area - pieces[i].gradient_offset_bytes;
    // The rank may name any place.
    const uint64_t memory_bytes = rank->memory_bytes;
    if (in_area < pieces[i].gradient_offset_bytes || place > memory_bytes ||
        in_piece > memory_bytes - place ||
        bytes > memory_bytes - place - in_piece) {
      return kNowhere;
    }
    // A device that loads vectors from elsewhere is lost for the process.
    if ((place + in_piece) % kAlignBytes != 0) return kNowhere;
    return rank->memory + (place + in_piece);
  }
  return kNowhere;
}

void SharedGradients::Distrust(const void* gradient) const {
  for (const auto& rank : ranks_) {
    if (!rank->HasInArea(gradient) || rank->is_distrusted.exchange(true)) {
      continue;
    }
    observe::LogRepeated(
        spdlog::level::err, "gradients that differ",
        absl::StrCat("rank ", rank->rank),
        "gradients on a device differ from those in the gradient area, which "
        "count; no more are taken from there: rank={} device={}",
        rank->rank, rank->device->info().name);
  }
}

}  // namespace optstate::scheduler
