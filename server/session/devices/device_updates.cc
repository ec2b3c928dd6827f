#include "server/session/devices/device_updates.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "server/scheduler/executors/shared_gradients.h"
#include "server/scheduler/passes/lag_pass.h"
#include "server/session/devices/resident_sizes.h"
#include "server/session/durability/job_storage.h"
#include "spdlog/spdlog.h"

namespace optstate::session {
namespace {

using scheduler::DeviceUpdateExecutor;
using scheduler::GradientLog;
using scheduler::WorkerUndo;

// The records of a job in memory that are open at the same time, so that
// batches are full: one of records that stay has 64 of 262,144 elements.
constexpr size_t kRecordsInMemory = 256;

void DescribeUse(const accelerator::Device& device,
                 const DeviceUpdateExecutor::DeviceCounters& counters,
                 v1::DeviceUse* use) {
  use->set_name(device.info().name);
  use->set_memory_bytes(device.info().memory_bytes);
  use->set_buffers(static_cast<uint32_t>(counters.batches));
  use->set_buffer_bytes(counters.batch_bytes);
  use->set_elements(counters.elements);
  use->set_resident_elements(counters.resident_elements);
  use->set_resident_bytes(counters.resident_bytes);
  use->set_shared_bytes(counters.shared_bytes);
  use->set_gradient_bytes(counters.gradient_bytes);
  use->set_refused_elements(counters.refused_elements);
  use->set_bytes_to_device(counters.bytes_to_device);
  use->set_bytes_to_host(counters.bytes_to_host);
  use->set_elements_per_s(counters.recent.ElementsPerSecond());
  use->set_copied_bytes_per_s(counters.recent.CopiedBytesPerSecond());
  if (!counters.failure.ok()) use->set_problem(counters.failure.ToString());
  use->set_is_lost(counters.is_lost);
}

// Gives the log, which is of no tile, this size; 0: it is needed no more, and
// its memory is given back.
absl::Status FitGradientLog(uint64_t bytes, storage::HostTier* tier) {
  if (tier->gradient_log().empty()) {
    return bytes == 0 ? absl::OkStatus() : tier->ReserveGradientLog(bytes);
  }
  GradientLog(tier->gradient_log()).Begin({});
  return tier->ResizeGradientLog(std::max(bytes, GradientLog::BytesNeeded({})));
}

// To a client, UNAVAILABLE says that no daemon has answered and that it may ask
// again, NOT_FOUND that there is no job, and INTERNAL that optstate has a
// mistake. A device's errors are another matter: the node has to be mended.
absl::Status OfNode(const absl::Status& status) {
  if (!absl::IsUnavailable(status) && !absl::IsNotFound(status) &&
      !absl::IsInternal(status)) {
    return status;
  }
  return absl::FailedPreconditionError(status.message());
}

// Returns the place of a rank's device among those on which records stay.
absl::StatusOr<size_t> DeviceOfRank(absl::string_view device,
                                    const JobContext& job) {
  OPTSTATE_RETURN_IF_ERROR(job.device_failure);
  const absl::Span<accelerator::Device* const> devices = job.devices.devices();
  const ResidentSizes sizes =
      ResidentSizesOf(job.shape->description, devices.size());
  if (sizes.device_bytes > 0 && sizes.log.tiles == 0) {
    return absl::NotFoundError(absl::StrCat(
        "updates of the optimizer ", job.layout().optimizer_info().name,
        " need whole parameters, whose gradients and results go through host "
        "memory"));
  }
  if (sizes.parameter_bytes == 0) {
    return absl::NotFoundError(
        "no record of the job stays on a device: it has no device_budget, or "
        "the CPU updates all");
  }
  // As while the engine makes room for the next one, which has them stay again.
  if (!storage::MayLag(*job.tier->control())) {
    return absl::NotFoundError("no record of the job stays on a device now");
  }
  const auto found = std::find_if(devices.begin(), devices.end(),
                                  [device](const accelerator::Device* each) {
                                    return each->info().id == device;
                                  });
  if (found != devices.end()) {
    return static_cast<size_t>(found - devices.begin());
  }
  std::vector<std::string> ids;
  for (const accelerator::Device* each : devices) {
    ids.push_back(each->info().id);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the rank is on device ", device,
                   ", and those of the daemon are ", absl::StrJoin(ids, ", "),
                   ": records stay on other devices than the rank's"));
}

absl::Status TryToShare(const v1::StorageSettings& storage, JobContext* job) {
  const double fraction = OffloadFractionOf(storage);
  if (fraction < 1) OPTSTATE_RETURN_IF_ERROR(OfNode(job->devices.Open()));
  OPTSTATE_RETURN_IF_ERROR(SettleRecords(job));
  OPTSTATE_RETURN_IF_ERROR(ReleaseDevices(job));
  JobDescription description = job->shape->description;
  description.storage = storage;
  const size_t devices = job->devices.devices().size();
  const ResidentSizes sizes = ResidentSizesOf(description, devices);
  OPTSTATE_RETURN_IF_ERROR(
      FitGradientLog(GradientLogBytes(description, devices), &*job->tier));
  OPTSTATE_RETURN_IF_ERROR(OfNode(
      job->executor->Share(fraction, job->layout().optimizer(),
                           job->devices.devices(), job->devices.kernels(),
                           {.device_bytes = sizes.device_bytes,
                            .batch_bytes = sizes.batch_bytes,
                            .host = {.parameters = job->store->parameter_area(),
                                     .log = job->tier->gradient_log(),
                                     .room = sizes.log,
                                     .content = sizes.log_content},
                            .parameters = job->layout().parameters().size()})));
  job->store->SetLag(job->executor->lag());
  if (sizes.log.tiles > 0) {
    storage::SetLag(sizes.log_content == GradientLog::Content::kSum
                        ? storage::Lag::kSums
                        : storage::Lag::kGradients,
                    job->tier->control());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckDeviceUpdates(const JobDescription& description,
                                JobContext* job) {
  if (OffloadFractionOf(description.storage) == 1) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(CheckResidents(description));
  absl::Status status = OfNode(job->devices.Open());
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
  return DeviceUpdateExecutor::HostBytes(
      devices, ResidentSizesOf(description, devices).batch_host_bytes,
      DeviceUpdateExecutor::BatchBytesFor(description.layout));
}

void MakeExecutor(JobContext* job) {
  const absl::Span<std::byte> undo = job->tier->undo();
  job->executor =
      std::make_unique<DeviceUpdateExecutor>(DeviceUpdateExecutor::Options{
          .pool = &job->pool,
          .undo = {reinterpret_cast<WorkerUndo*>(undo.data()),
                   undo.size() / sizeof(WorkerUndo)},
          .observer = job->options.observer,
          // A job without elements has no tile, whose place would count.
          .flat_elements = std::max<uint64_t>(1, job->layout().flat_elements()),
          .trace = &job->trace,
          .batch_bytes = DeviceUpdateExecutor::BatchBytesFor(job->layout()),
          // Without a disk a pin takes nothing.
          .records_max = job->store->is_resident() ? kRecordsInMemory : 2});
}

absl::Status SettleRecords(JobContext* job) {
  storage::RecordLag* const lag =
      job->executor == nullptr ? nullptr : job->executor->lag();
  if (lag == nullptr || job->store == nullptr) return absl::OkStatus();
  if (!storage::MayLag(*job->tier->control())) {
    job->executor->DropCopies();
    return absl::OkStatus();
  }
  return job->AccessRecords([&] {
    return scheduler::CatchUpRecords(lag, /*is_written=*/true, job->store.get(),
                                     &job->pool);
  });
}

absl::Status ReleaseDevices(JobContext* job) {
  if (job->executor == nullptr || job->executor->lag() == nullptr) {
    return absl::OkStatus();
  }
  const absl::Status settled = SettleRecords(job);
  if (job->store != nullptr) job->store->SetLag(nullptr);
  job->executor->Release();
  if (settled.ok()) {
    storage::SetLag(storage::Lag::kNone, job->tier->control());
  } else {
    spdlog::error(
        "the gradient log keeps what records lack: job={} error=\"{}\"",
        job->options.name, settled.ToString());
  }
  return settled;
}

absl::Status ShareUpdates(const v1::StorageSettings& storage, JobContext* job) {
  absl::Status status = TryToShare(storage, job);
  if (!status.ok()) {
    observe::LogRepeated(
        spdlog::level::warn, "updates without devices",
        absl::StrCat("job ", job->options.name),
        "updates are not shared with devices: job={} offload_fraction={} "
        "error=\"{}\"",
        job->options.name, OffloadFractionOf(storage), status.ToString());
  }
  job->device_failure = status;
  return status;
}

absl::Status CheckMayShare(const JobContext& job) {
  OPTSTATE_RETURN_IF_ERROR(job.CheckRegistered());
  OPTSTATE_RETURN_IF_ERROR(job.failure);
  return job.recovery.has_value() ? job.StillRecovering() : absl::OkStatus();
}

absl::StatusOr<DeviceParameters> ShareParameters(absl::string_view device,
                                                 JobContext* job) {
  const absl::StatusOr<size_t> index = DeviceOfRank(device, *job);
  if (absl::IsNotFound(index.status())) return index.status();
  OPTSTATE_RETURN_IF_ERROR(job->device_failure);
  const JobDescription& description = job->shape->description;
  if (const double fraction = OffloadFractionOf(description.storage);
      fraction > 0) {
    return absl::NotFoundError(absl::StrCat(
        "the CPU updates ", fraction,
        " of the elements, so that a device has only parts of parameters. "
        "offload_fraction=0 has parameters there whole"));
  }
  OPTSTATE_RETURN_IF_ERROR(index.status());
  const ResidentSizes sizes =
      ResidentSizesOf(description, job->devices.devices().size());
  absl::StatusOr<scheduler::DeviceParameters> shared =
      job->executor->ShareParameters(*index, sizes.parameter_bytes,
                                     job->layout().run_count());
  if (!shared.ok()) return OfNode(shared.status());
  DeviceParameters parameters;
  parameters.table = std::move(shared->table);
  parameters.memory = std::move(shared->memory.file);
  parameters.device_index = static_cast<uint32_t>(*index);
  parameters.memory_bytes = shared->memory.bytes;
  return parameters;
}

absl::Status ShareGradients(const RankOnDevice& rank, DeviceGradients gradients,
                            JobContext* job) {
  job->executor->gradients().Unmap(rank.rank);
  if (gradients.memory_bytes == 0) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(const size_t index,
                            DeviceOfRank(rank.device, *job));
  const JobDescription& description = job->shape->description;
  if (description.accumulate ||
      (job->is_replicated() && job->shape->partitions.size() > 1)) {
    return absl::NotFoundError(
        "updates read sums of gradients, of micro-steps or of ranks, which "
        "the engine has in host memory");
  }
  const DeviceUpdateExecutor::Counters counters = job->executor->counters();
  if (index >= counters.devices.size() || counters.devices[index].is_lost) {
    return absl::FailedPreconditionError(
        absl::StrCat("the engine has lost device ", index));
  }
  scheduler::SharedGradients::Shared shared;
  shared.rank = rank.rank;
  shared.device = job->devices.devices()[index];
  shared.device_index = index;
  shared.memory.file = std::move(gradients.memory);
  shared.memory.bytes = gradients.memory_bytes;
  shared.memory.device = std::string(rank.device);
  shared.table = std::move(gradients.table);
  shared.area = rank.area;
  shared.parameter_count = job->parameter_count();
  return OfNode(job->executor->gradients().Map(
      std::move(shared), job->shape->partitions[rank.rank]));
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
  updates->set_too_large_elements(counters.too_large_elements);
  updates->set_log_bytes(counters.log_bytes);
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
