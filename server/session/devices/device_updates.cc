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
  const absl::Status& failure =
      job.device_failure.ok() ? counters.failure : job.device_failure;
  if (!failure.ok()) updates->set_problem(failure.ToString());
}

}  // namespace optstate::session
