#include "server/admin/device_report.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "absl/status/statusor.h"
#include "server/config/device_setting.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::admin {
namespace {

// Reports by index.
using Reports = std::map<uint32_t, v1::DeviceReport>;

void AddDevice(uint32_t index, const std::string& name, uint64_t memory_bytes,
               Reports* reports) {
  v1::DeviceReport& report = (*reports)[index];
  report.set_index(index);
  report.set_name(name);
  report.set_memory_bytes(memory_bytes);
}

void AddEmulated(size_t count, Reports* reports) {
  const auto infos =
      accelerator::MakeEmulatedRuntime({.devices = count})->Devices();
  if (!infos.ok()) return;
  for (const accelerator::DeviceInfo& info : *infos) {
    AddDevice(static_cast<uint32_t>(reports->size()), info.name,
              info.memory_bytes, reports);
  }
}

void AddJob(const v1::Job& job, Reports* reports) {
  for (const v1::DeviceUse& use : job.device_updates().uses()) {
    AddDevice(use.index(), use.name(), use.memory_bytes(), reports);
    v1::DeviceJob* added = (*reports)[use.index()].add_jobs();
    added->set_job(job.name());
    added->set_offload_fraction(job.device_updates().offload_fraction());
    *added->mutable_use() = use;
  }
}

std::string NoteOf(config::DeviceKind kind, const Reports& reports) {
  if (kind == config::DeviceKind::kNone) {
    return "this daemon has no devices: start optstated with --devices, or set "
           "`devices` in its configuration";
  }
  if (kind == config::DeviceKind::kCuda && reports.empty()) {
    return "no job uses a device; an engine opens them for the first "
           "offload_fraction below 1 (optctl set job JOB offload_fraction=0.5)";
  }
  return "";
}

}  // namespace

v1::DescribeDevicesReply DescribeDevices(const std::string& setting,
                                         v1::ListJobsReply jobs) {
  v1::DescribeDevicesReply reply;
  reply.set_setting(setting);
  reply.mutable_unanswered()->Swap(jobs.mutable_unanswered());
  const auto parsed = config::ParseDeviceSetting(setting);
  if (!parsed.ok()) {
    reply.set_note(std::string(parsed.status().message()));
    return reply;
  }
  Reports reports;
  if (parsed->kind == config::DeviceKind::kEmulated) {
    AddEmulated(parsed->emulated, &reports);
  }
  for (const v1::Job& job : jobs.jobs()) AddJob(job, &reports);
  for (auto& [index, report] : reports) {
    *reply.add_devices() = std::move(report);
  }
  reply.set_note(NoteOf(parsed->kind, reports));
  return reply;
}

}  // namespace optstate::admin
