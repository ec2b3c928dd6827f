#include "server/scheduler/executors/device_counts.h"

#include "absl/strings/str_cat.h"
#include "server/observe/peer_log.h"
#include "spdlog/spdlog.h"

namespace optstate::scheduler {

void DeviceCounts::BeginDevices(size_t devices) {
  const absl::MutexLock lock(&mu_);
  counters_.devices.assign(devices, DeviceCounters());
}

void DeviceCounts::NoteFailure(size_t device, const absl::Status& failure,
                               bool is_lost) {
  observe::LogRepeated(
      spdlog::level::warn, is_lost ? "a lost device" : "a device's failure",
      absl::StrCat(device),
      "the CPU updates in place of a device: device={} lost={} error=\"{}\"",
      device, is_lost, failure.ToString());
  const absl::MutexLock lock(&mu_);
  counters_.failure = failure;
  counters_.devices[device].failure = failure;
  counters_.devices[device].is_lost = is_lost;
}

void DeviceCounts::CountBatch(size_t device, const UpdateBatch& batch) {
  const uint64_t refused = batch.refused_elements();
  const uint64_t elements = batch.elements() - refused - batch.left_elements();
  const absl::MutexLock lock(&mu_);
  counters_.device_elements += elements;
  counters_.cpu_elements += refused;
  DeviceCounters& counters = counters_.devices[device];
  counters.elements += elements;
  counters.gradient_bytes += batch.bytes_there();
  counters.refused_elements += refused;
  counters.bytes_to_device += batch.bytes_to_device();
  counters.bytes_to_host += batch.bytes_to_host();
}

void DeviceCounts::CountCpu(uint64_t elements) {
  const absl::MutexLock lock(&mu_);
  counters_.cpu_elements += elements;
}

void DeviceCounts::CountTooLarge(uint64_t elements) {
  const absl::MutexLock lock(&mu_);
  counters_.too_large_elements += elements;
}

void DeviceCounts::Set(absl::FunctionRef<void(Counters&)> set) {
  const absl::MutexLock lock(&mu_);
  set(counters_);
}

}  // namespace optstate::scheduler
