#include "server/session/devices/device_updates.h"

#include <memory>

#include "proto/types/status_macros.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "server/session/durability/job_storage.h"
#include "spdlog/spdlog.h"

namespace optstate::session {
namespace {

using scheduler::DeviceUpdateExecutor;
using scheduler::WorkerUndo;

void DescribeUse(const accelerator::Device& device,
                 const DeviceUpdateExecutor::DeviceCounters& counters,
                 v1::DeviceUse* use) {
  use->set_name(device.info().name);
  use->set_memory_bytes(device.info().memory_bytes);
  use->set_buffers(static_cast<uint32_t>(counters.batches));
  use->set_buffer_bytes(counters.batch_bytes);
  use->set_elements(counters.elements);
  use->set_bytes_to_device(counters.bytes_to_device);
  use->set_bytes_to_host(counters.bytes_to_host);
  use->set_elements_per_s(counters.recent.ElementsPerSecond());
  use->set_copied_bytes_per_s(counters.recent.CopiedBytesPerSecond());
  if (!counters.failure.ok()) use->set_problem(counters.failure.ToString());
  use->set_is_lost(counters.is_lost);
}

absl::Status TryToShare(double offload_fraction, JobContext* job) {
  if (offload_fraction < 1) OPTSTATE_RETURN_IF_ERROR(job->devices.Open());
  return job->executor->Share(offload_fraction, job->layout().optimizer(),
                              job->devices.devices(), job->devices.kernels());
}

}  // namespace

absl::Status CheckDeviceUpdates(const JobDescription& description,
                                JobContext* job) {
  if (OffloadFractionOf(description.storage) == 1) return absl::OkStatus();
  absl::Status status = job->devices.Open();
  if (status.ok()) {
    status = job->devices.kernels()->CanUpdate(description.layout.optimizer());
  }
  return Annotate(status,
                  "offload_fraction: a part of the elements is to be updated "
                  "by a device; leave it out to have all updated by the CPU");
}

uint64_t DeviceUpdateBytes(const JobContext& job,
                           const JobDescription& description) {
  const size_t devices = job.devices.devices().size();
  if (devices == 0 || OffloadFractionOf(description.storage) == 1) return 0;
  return DeviceUpdateExecutor::HostBytes(devices);
}

void MakeExecutor(JobContext* job) {
  const absl::Span<std::byte> undo = job->tier->undo();
  job->executor =
      std::make_unique<DeviceUpdateExecutor>(DeviceUpdateExecutor::Options{
          .pool = &job->pool,
          .undo = {reinterpret_cast<WorkerUndo*>(undo.data()),
                   undo.size() / sizeof(WorkerUndo)},
          .observer = job->options.observer});
}

absl::Status ShareUpdates(double offload_fraction, JobContext* job) {
  absl::Status status = TryToShare(offload_fraction, job);
  if (!status.ok()) {
    spdlog::warn(
        "updates are not shared with devices: job={} offload_fraction={} "
        "error=\"{}\"",
        job->options.name, offload_fraction, status.ToString());
  }
  job->device_failure = status;
  return status;
}

void DescribeDeviceUpdates(const JobContext& job, v1::Job* description) {
  const double fraction = OffloadFractionOf(job.shape->description.storage);
  if (fraction == 1 || job.executor == nullptr) return;
  v1::DeviceUpdates* updates = description->mutable_device_updates();
  for (const accelerator::Device* device : job.devices.devices()) {
    updates->add_devices(device->info().name);
  }
  updates->set_offload_fraction(fraction);
  const DeviceUpdateExecutor::Counters counters = job.executor->counters();
  updates->set_device_elements(counters.device_elements);
  updates->set_cpu_elements(counters.cpu_elements);
  const absl::Span<accelerator::Device* const> devices = job.devices.devices();
  for (size_t i = 0; i < devices.size(); ++i) {
    v1::DeviceUse* use = updates->add_uses();
    use->set_index(static_cast<uint32_t>(i));
    // Without batches it has nothing there.
    DescribeUse(*devices[i],
                i < counters.devices.size()
                    ? counters.devices[i]
                    : DeviceUpdateExecutor::DeviceCounters(),
                use);
  }
  const absl::Status& failure =
      job.device_failure.ok() ? counters.failure : job.device_failure;
  if (!failure.ok()) updates->set_problem(failure.ToString());
}

}  // namespace optstate::session
