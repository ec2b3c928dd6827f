#include "server/metrics/job_samples.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/metrics/code_label.h"
#include "server/metrics/report_time.h"

namespace optstate::metrics {
namespace {

constexpr double kNs = 1e9;  // in a second

Label Named(const v1::Job& job) { return {"job_name", job.name()}; }

void AddPhase(const v1::Job& job, Samples* samples) {
  for (const v1::JobPhase phase : kPhases) {
    samples->Add(Metric::kJobPhase, job.phase() == phase ? 1 : 0,
                 {Named(job), {"phase", std::string(PhaseName(phase))}});
  }
}

void AddStepPhase(const v1::Job& job, const v1::PhaseHistogram& phase,
                  Samples* samples) {
  prometheus::ClientMetric::Histogram histogram;
  histogram.sample_sum = phase.sum_s();
  for (int i = 0; i < phase.steps_size(); ++i) {
    histogram.sample_count += phase.steps(i);
    // The last bucket has no bound; the serializer writes it.
    if (i < phase.bounds_s_size()) {
      histogram.bucket.push_back({histogram.sample_count, phase.bounds_s(i)});
    }
  }
  samples->AddHistogram(Metric::kJobStepPhase, std::move(histogram),
                        {Named(job), {"phase", phase.phase()}});
}

void AddSteps(const v1::Job& job, Samples* samples) {
  samples->Add(Metric::kJobSkippedSteps,
               static_cast<double>(job.skipped_steps()), {Named(job)});
  samples->Add(Metric::kJobRecoveredSteps,
               static_cast<double>(job.recovered_steps()), {Named(job)});
  samples->Add(Metric::kJobRolledBackRuns,
               static_cast<double>(job.rolled_back_runs()), {Named(job)});
  if (job.has_committed_at()) {
    samples->Add(Metric::kJobCommittedTime, SecondsOf(job.committed_at()),
                 {Named(job)});
  }
  for (const v1::PhaseHistogram& phase : job.step_phases()) {
    AddStepPhase(job, phase, samples);
  }
  const v1::StepTimes& mean = job.mean_step_times();
  if (mean.update_ns() != 0) {
    samples->Add(Metric::kJobUpdateBandwidth,
                 static_cast<double>(mean.update_bytes()) * kNs /
                     static_cast<double>(mean.update_ns()),
                 {Named(job)});
  }
  if (mean.memory_share() != 0) {
    samples->Add(Metric::kJobMemoryShare, mean.memory_share(), {Named(job)});
  }
}

// Adds the requests that the engine has refused over a wire, by code.
void AddRefused(const v1::Job& job, const v1::WireBytes& wire,
                Samples* samples) {
  std::map<std::string, uint64_t> requests;
  for (const absl::StatusCode code : kCommonCodes) {
    requests[CodeLabel(code).value] = 0;
  }
  for (const v1::RefusedRequests& refused : wire.refused()) {
    requests[refused.code()] = refused.requests();
  }
  for (const auto& [code, count] : requests) {
    samples->Add(Metric::kJobRequestsRefused, static_cast<double>(count),
                 {Named(job), {"wire", wire.wire()}, {"code", code}});
  }
}

void AddQueues(const v1::Job& job, const v1::WireBytes& wire,
               Samples* samples) {
  const auto add = [&](const char* queue, uint64_t length) {
    samples->Add(Metric::kJobQueueDepth, static_cast<double>(length),
                 {Named(job), {"wire", wire.wire()}, {"queue", queue}});
  };
  // Requests over gRPC wait in gRPC, which does not tell.
  if (wire.wire() == "shm") add("requests", wire.requests_waiting());
  add("replies", wire.replies_waiting());
}

void AddWires(const v1::Job& job, Samples* samples) {
  for (const v1::WireBytes& wire : job.wires()) {
    const std::pair<const char*, uint64_t> directions[] = {
        {"gradients", wire.gradient_bytes()},
        {"sent", wire.sent_bytes()},
        {"loaded", wire.load_bytes()}};
    for (const auto& [direction, bytes] : directions) {
      samples->Add(
          Metric::kJobWireBytes, static_cast<double>(bytes),
          {Named(job), {"wire", wire.wire()}, {"direction", direction}});
    }
    AddRefused(job, wire, samples);
    AddQueues(job, wire, samples);
  }
}

void AddOptional(const v1::Job& job, Samples* samples) {
  if (job.has_memory_lock()) {
    samples->Add(Metric::kJobMemoryLockedBytes,
                 static_cast<double>(job.memory_lock().locked_bytes()),
                 {Named(job)});
    samples->Add(Metric::kJobMemoryUnlockedBytes,
                 static_cast<double>(job.memory_lock().unlocked_bytes()),
                 {Named(job)});
  }
  if (job.has_speculation()) {
    samples->Add(Metric::kJobSpeculatedSteps,
                 static_cast<double>(job.speculation().steps_begun()),
                 {Named(job)});
    samples->Add(Metric::kJobSpeculatedStepsRolledBack,
                 static_cast<double>(job.speculation().steps_rolled_back()),
                 {Named(job)});
  }
}

void AddDirectory(const v1::Job& job, const std::string& directory,
                  const v1::DirectoryIo& io, Samples* samples) {
  const auto add = [&](Metric metric, uint64_t value) {
    samples->Add(metric, static_cast<double>(value),
                 {Named(job), {"directory", directory}});
  };
  add(Metric::kJobDiskReadBytes, io.bytes_read());
  add(Metric::kJobDiskWrittenBytes, io.bytes_written());
  add(Metric::kJobDiskReads, io.reads());
  add(Metric::kJobDiskWrites, io.writes());
  add(Metric::kJobDiskSyncs, io.syncs());
  add(Metric::kJobDiskErrors, io.errors());
  add(Metric::kJobDiskQueueDepth, io.queue_depth());
  samples->Add(Metric::kJobDiskBusy, static_cast<double>(io.busy_ns()) / kNs,
               {Named(job), {"directory", directory}});
}

void AddParameterCache(const v1::Job& job, const v1::ParameterCache& cache,
                       Samples* samples) {
  const std::pair<const char*, uint64_t> places[] = {
      {"frame", cache.from_frames()},
      {"cache", cache.hits()},
      {"disk", cache.misses()}};
  for (const auto& [place, count] : places) {
    samples->Add(Metric::kJobParameterFetches, static_cast<double>(count),
                 {Named(job), {"from", place}});
  }
}

}  // namespace

absl::string_view PhaseName(v1::JobPhase phase) {
  switch (phase) {
    case v1::JOB_PHASE_EMPTY:
      return "empty";
    case v1::JOB_PHASE_LOADING:
      return "loading";
    case v1::JOB_PHASE_READY:
      return "ready";
    case v1::JOB_PHASE_FAILED:
      return "failed";
    case v1::JOB_PHASE_RECOVERING:
      return "recovering";
    case v1::JOB_PHASE_ASLEEP:
      return "asleep";
    default:
      return "unknown";
  }
}

void AddJob(const v1::Job& job, Samples* samples) {
  const bool is_up = job.engine_pid() != 0 && !job.ranks_unknown();
  samples->Add(Metric::kJobUp, is_up ? 1 : 0, {Named(job)});
  AddPhase(job, samples);
  samples->Add(Metric::kJobEngineRestarts,
               static_cast<double>(job.engine_restarts()), {Named(job)});
  if (!job.state_unknown()) {
    samples->Add(Metric::kJobRanks, static_cast<double>(job.world_size()),
                 {Named(job)});
    samples->Add(Metric::kJobElements, static_cast<double>(job.element_count()),
                 {Named(job)});
    samples->Add(Metric::kJobStateBytes, static_cast<double>(job.state_bytes()),
                 {Named(job)});
    samples->Add(Metric::kJobCommittedStep,
                 static_cast<double>(job.committed_step()), {Named(job)});
  }
  if (!is_up) return;
  samples->Add(Metric::kJobSessions, static_cast<double>(job.session_count()),
               {Named(job)});
  AddSteps(job, samples);
  AddWires(job, samples);
  AddOptional(job, samples);
  if (job.has_disk()) AddDisk(job, samples);
  if (job.has_device_updates()) AddDevices(job, samples);
}

void AddDisk(const v1::Job& job, Samples* samples) {
  const v1::DiskState& disk = job.disk();
  const int directories =
      std::min(disk.directories_size(), disk.directory_io_size());
  for (int i = 0; i < directories; ++i) {
    AddDirectory(job, disk.directories(i), disk.directory_io(i), samples);
  }
  const auto add = [&](Metric metric, double value) {
    samples->Add(metric, value, {Named(job)});
  };
  add(Metric::kJobDiskRecords, static_cast<double>(disk.records()));
  add(Metric::kJobDiskFrames, static_cast<double>(disk.frames()));
  add(Metric::kJobDiskFramesBytes, static_cast<double>(disk.frames()) *
                                       static_cast<double>(disk.frame_bytes()));
  add(Metric::kJobDiskDurableStep, static_cast<double>(disk.durable_step()));
  add(Metric::kJobDiskDamagedRecords,
      static_cast<double>(disk.damaged_records()));
  if (disk.has_last_verified_at()) {
    add(Metric::kJobDiskVerifiedTime, SecondsOf(disk.last_verified_at()));
  }
  add(Metric::kJobDiskScrubs, static_cast<double>(disk.scrubs()));
  add(Metric::kJobDiskStepWait,
      static_cast<double>(disk.step_waited_ns()) / kNs);
  if (disk.has_parameter_cache()) {
    AddParameterCache(job, disk.parameter_cache(), samples);
  }
}

void AddDevices(const v1::Job& job, Samples* samples) {
  const v1::DeviceUpdates& updates = job.device_updates();
  samples->Add(Metric::kJobCpuElements,
               static_cast<double>(updates.cpu_elements()), {Named(job)});
  for (const v1::DeviceUse& use : updates.uses()) {
    const Label device = {"device", absl::StrCat(use.index())};
    const auto add = [&](Metric metric, uint64_t value) {
      samples->Add(metric, static_cast<double>(value), {Named(job), device});
    };
    add(Metric::kJobDeviceElements, use.elements());
    samples->Add(Metric::kJobDeviceCopiedBytes,
                 static_cast<double>(use.bytes_to_device()),
                 {Named(job), device, {"direction", "to_device"}});
    samples->Add(Metric::kJobDeviceCopiedBytes,
                 static_cast<double>(use.bytes_to_host()),
                 {Named(job), device, {"direction", "to_host"}});
    add(Metric::kJobDeviceBufferBytes, use.buffer_bytes());
    add(Metric::kJobDeviceResidentBytes, use.resident_bytes());
    add(Metric::kJobDeviceLost, use.is_lost() ? 1 : 0);
  }
}

}  // namespace optstate::metrics
