#include "server/scheduler/executors/device_trace.h"

#include <cstdint>
#include <optional>

#include "absl/strings/str_cat.h"

namespace optstate::scheduler {
namespace {

constexpr const char* kLanes[] = {"to device", "kernel", "from device"};
constexpr uint32_t kLanesOfDevice = 3;

// Lanes are numbered device by device.
observe::LaneName NameLane(uint32_t lane) {
  return {absl::StrCat("device ", lane / kLanesOfDevice),
          kLanes[lane % kLanesOfDevice]};
}

}  // namespace

DeviceTrace::DeviceTrace(observe::TraceRecorder* recorder)
    : source_(recorder, &NameLane) {}

void DeviceTrace::Record(size_t device, const UpdateBatch& batch) {
  if (!on()) return;
  const std::optional<BatchTimes> times = batch.Times();
  if (!times.has_value()) return;
  const auto lane = static_cast<uint32_t>(device) * kLanesOfDevice;
  const uint64_t step = batch.step();
  source_.Record({kLanes[0], lane, times->begin_ns, times->copied_ns, step,
                  batch.bytes_to_device()});
  source_.Record(
      {kLanes[1], lane + 1, times->copied_ns, times->computed_ns, step, 0});
  source_.Record({kLanes[2], lane + 2, times->computed_ns, times->end_ns, step,
                  batch.bytes_to_host()});
}

}  // namespace optstate::scheduler
