#include "client/views/device_parameters.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "proto/types/dtype.h"
#include "proto/types/runs.h"
#include "proto/types/status_macros.h"

namespace optstate::client {

absl::StatusOr<std::unique_ptr<DeviceParameters>> DeviceParameters::Map(
    Shared shared, const Layout& layout, uint32_t connection) {
  UniqueFd table = std::move(shared.table);
  auto mapped = absl::WrapUnique(
      new DeviceParameters(std::move(shared), layout, connection));
  OPTSTATE_RETURN_IF_ERROR(Annotate(mapped->MapTable(std::move(table)),
                                    "table of parameters on a device"));
  return mapped;
}

absl::Status DeviceParameters::MapTable(UniqueFd table) {
  const uint64_t bytes = shm::DeviceParametersBytes(layout_.run_count());
  OPTSTATE_ASSIGN_OR_RETURN(table_,
                            shm::PeerSegment::Map(std::move(table), bytes));
  const shm::DeviceParametersHeader& h = header();
  if (h.magic != shm::kDeviceParametersMagic) {
    return absl::InternalError("wrong magic number");
  }
  if (h.version != shm::kDeviceParametersVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("it has version ", h.version, "; this client reads ",
                     shm::kDeviceParametersVersion));
  }
  if (h.segment_bytes != bytes || h.run_count != layout_.run_count()) {
    return absl::InternalError(
        absl::StrCat("it says ", h.segment_bytes, " bytes and ", h.run_count,
                     " runs; expected ", bytes, " and ", layout_.run_count()));
  }
  return absl::OkStatus();
}

absl::Status DeviceParameters::FindRanges(
    uint32_t parameter, const std::atomic<uint64_t>* run_stamps,
    std::vector<Range>* ranges) const {
  ranges->clear();
  if (is_over()) return absl::OkStatus();
  const ParameterSpec& spec = layout_.parameters()[parameter];
  const auto numel = static_cast<uint64_t>(spec.numel);
  const uint64_t element_bytes = SizeInBytes(spec.dtype);
  absl::Status status;
  ForEachRun(
      layout_, parameter, 0, numel,
      [&](uint64_t run, uint64_t begin, uint64_t run_numel) {
        const uint64_t step = entry(run).step.load(std::memory_order_acquire);
        const uint64_t place = entry(run).place.load(std::memory_order_relaxed);
        if (step == 0 || shm::DeviceOfPlace(place) != device_index_ ||
            (run_stamps != nullptr &&
             run_stamps[run].load(std::memory_order_acquire) != step)) {
          return;
        }
        const uint64_t offset = shm::OffsetOfPlace(place);
        const uint64_t bytes = run_numel * element_bytes;
        if (bytes > memory_bytes_ || offset > memory_bytes_ - bytes) {
          status = absl::InternalError(
              absl::StrCat("the engine has run ", run, " at byte ", offset,
                           " of ", memory_bytes_, " of a device's memory"));
          return;
        }
        if (!ranges->empty() && ranges->back().end == begin &&
            ranges->back().offset_bytes +
                    (begin - ranges->back().begin) * element_bytes ==
                offset) {
          ranges->back().end = begin + run_numel;
        } else {
          ranges->push_back({begin, begin + run_numel, offset});
        }
      });
  if (!status.ok()) {
    ranges->clear();
    return status;
  }
  const auto is_short = [&](const Range& range) {
    const uint64_t elements = range.end - range.begin;
    return elements < numel && elements * element_bytes < kRangeBytesMin;
  };
  ranges->erase(std::remove_if(ranges->begin(), ranges->end(), is_short),
                ranges->end());
  return absl::OkStatus();
}

absl::Status DeviceParameters::FindWhole(
    absl::Span<const uint32_t> parameters,
    const std::atomic<uint64_t>* run_stamps,
    absl::Span<uint64_t> offsets) const {
  std::vector<Range> ranges;
  for (size_t i = 0; i < parameters.size(); ++i) {
    OPTSTATE_RETURN_IF_ERROR(FindRanges(parameters[i], run_stamps, &ranges));
    const auto numel =
        static_cast<uint64_t>(layout_.parameters()[parameters[i]].numel);
    const bool is_whole =
        ranges.size() == 1 && ranges[0].begin == 0 && ranges[0].end == numel;
    offsets[i] = is_whole ? ranges[0].offset_bytes : kNowhere;
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
