#include "server/metrics/metric_table.h"

#include <iterator>

namespace optstate::metrics {
namespace {

constexpr auto kCounter = prometheus::MetricType::Counter;
constexpr auto kGauge = prometheus::MetricType::Gauge;
constexpr auto kHistogram = prometheus::MetricType::Histogram;

constexpr MetricInfo kMetrics[] = {
    {Metric::kBuildInfo, "optstate_build_info", kGauge,
     "The build that runs, as labels. Always 1."},
    {Metric::kStartTime, "optstate_start_time_seconds", kGauge,
     "When the daemon started, in seconds since 1970."},
    {Metric::kDraining, "optstate_draining", kGauge,
     "1 while the daemon takes no new steps and sessions."},
    {Metric::kUpgradeRunning, "optstate_upgrade_running", kGauge,
     "1 while engines are replaced after an upgrade."},
    {Metric::kUpdateThreads, "optstate_update_threads", kGauge,
     "Update threads of each engine."},
    {Metric::kJobs, "optstate_jobs", kGauge, "Jobs of the node, by phase."},
    {Metric::kJobsUnanswered, "optstate_jobs_unanswered", kGauge,
     "Jobs whose engine runs and gave no answer in time."},
    {Metric::kJobsOmitted, "optstate_jobs_omitted", kGauge,
     "Jobs that have no samples of their own, because the node has more than "
     "256."},
    {Metric::kSessions, "optstate_sessions", kGauge,
     "Sessions of all jobs whose engines answered."},
    {Metric::kStateBytes, "optstate_state_bytes", kGauge,
     "Bytes of the state of all jobs."},
    {Metric::kStateAvailableBytes, "optstate_state_available_bytes", kGauge,
     "Bytes that further jobs may take. Absent when it is not known."},
    {Metric::kMemoryLockedBytes, "optstate_memory_locked_bytes", kGauge,
     "Bytes of state that are locked in memory."},
    {Metric::kMemoryLockPendingBytes, "optstate_memory_lock_pending_bytes",
     kGauge, "Bytes of state that are being locked in memory."},
    {Metric::kMemoryUnlockedBytes, "optstate_memory_unlocked_bytes", kGauge,
     "Bytes of state that may go to swap."},

    {Metric::kTierUp, "optstate_tier_up", kGauge,
     "1 when the tier's directory could be looked at."},
    {Metric::kTierCapacityBytes, "optstate_tier_capacity_bytes", kGauge,
     "Bytes of the file system of a tier's directory."},
    {Metric::kTierUsedBytes, "optstate_tier_used_bytes", kGauge,
     "Bytes of all jobs' files in a tier's directory."},
    {Metric::kTierFreeBytes, "optstate_tier_free_bytes", kGauge,
     "Bytes that a tier's directory has left. Absent when it is not known."},
    {Metric::kTierLimitBytes, "optstate_tier_limit_bytes", kGauge,
     "Bytes that jobs may have in a tier's directory. Absent: no limit."},
    {Metric::kTierBandwidth, "optstate_tier_measured_bytes_per_second", kGauge,
     "Measured bandwidth. Absent when it was not measured."},
    {Metric::kFramesBytes, "optstate_frames_bytes", kGauge,
     "Bytes of memory for records that are swapped, of all jobs."},
    {Metric::kFramesBudgetBytes, "optstate_frames_budget_bytes", kGauge,
     "Bytes of memory that all jobs may have for records that are swapped. "
     "Absent: what the memory has."},
    {Metric::kDeviceMemoryBytes, "optstate_device_memory_bytes", kGauge,
     "Bytes of memory of a device that jobs may use."},

    {Metric::kJobUp, "optstate_job_up", kGauge,
     "1 when the job's engine runs and answered in time."},
    {Metric::kJobPhase, "optstate_job_phase", kGauge,
     "1 for the phase that the job is in, else 0."},
    {Metric::kJobSessions, "optstate_job_sessions", kGauge,
     "Sessions of the job."},
    {Metric::kJobRanks, "optstate_job_ranks", kGauge,
     "Ranks that the job is made for, on this node."},
    {Metric::kJobElements, "optstate_job_elements", kGauge,
     "Elements of the job's parameters."},
    {Metric::kJobStateBytes, "optstate_job_state_bytes", kGauge,
     "Bytes of the job's state."},
    {Metric::kJobTierBytes, "optstate_job_tier_bytes", kGauge,
     "Bytes of the job's files in a tier's directory."},
    {Metric::kJobCommittedStep, "optstate_job_committed_step", kGauge,
     "The last committed step. It falls when the job goes back to a durable "
     "step."},
    {Metric::kJobCommittedTime, "optstate_job_committed_timestamp_seconds",
     kGauge, "When that step was committed, in seconds since 1970."},
    {Metric::kJobSkippedSteps, "optstate_job_skipped_steps_total", kCounter,
     "Steps that changed nothing, because gradients were not finite."},
    {Metric::kJobRecoveredSteps, "optstate_job_recovered_steps_total", kCounter,
     "Steps that an engine died in and that the next engine finished."},
    {Metric::kJobRolledBackRuns, "optstate_job_rolled_back_runs_total",
     kCounter, "Runs of elements that were being written when an engine died."},
    {Metric::kJobEngineRestarts, "optstate_job_engine_restarts_total", kCounter,
     "Engines that were started because one died."},
    {Metric::kJobStepPhase, "optstate_job_step_phase_seconds", kHistogram,
     "Time of each phase of the job's steps. A job on disk has the phase disk "
     "wait too, which is a part of the update."},
    {Metric::kJobUpdateBandwidth, "optstate_job_update_bytes_per_second",
     kGauge, "Bytes that the update moves in a second, of the last 16 steps."},
    {Metric::kJobMemoryShare, "optstate_job_update_memory_ratio", kGauge,
     "The same as part of the memory's measured bandwidth. Absent when it was "
     "not measured."},
    {Metric::kJobMemoryLockedBytes, "optstate_job_memory_locked_bytes", kGauge,
     "Bytes of the job's state that are locked in memory."},
    {Metric::kJobMemoryUnlockedBytes, "optstate_job_memory_unlocked_bytes",
     kGauge, "Bytes of the job's state that may go to swap."},
    {Metric::kJobSpeculatedSteps, "optstate_job_speculated_steps_total",
     kCounter, "Steps that were begun before they were decided."},
    {Metric::kJobSpeculatedStepsRolledBack,
     "optstate_job_speculated_steps_rolled_back_total", kCounter,
     "Steps among these that were rolled back."},
    {Metric::kJobWireBytes, "optstate_job_wire_bytes_total", kCounter,
     "Bytes between ranks and the job's engine: gradients that were pushed, "
     "parameters and state that were sent or published, and what was loaded."},
    {Metric::kJobRequestsRefused, "optstate_job_requests_refused_total",
     kCounter,
     "Requests of ranks that the job's engine refused, sessions that it ended "
     "with an error and connections that it did not take, by the code."},
    {Metric::kJobQueueDepth, "optstate_job_queue_depth", kGauge,
     "Requests in the rings of the job's sessions that are not carried out, "
     "and replies that ranks have not read."},

    {Metric::kJobDiskReadBytes, "optstate_job_disk_read_bytes_total", kCounter,
     "Bytes that the engine has read from a directory."},
    {Metric::kJobDiskWrittenBytes, "optstate_job_disk_written_bytes_total",
     kCounter, "Bytes that the engine has written to a directory."},
    {Metric::kJobDiskReads, "optstate_job_disk_reads_total", kCounter,
     "Reads from a directory that succeeded."},
    {Metric::kJobDiskWrites, "optstate_job_disk_writes_total", kCounter,
     "Writes to a directory that succeeded."},
    {Metric::kJobDiskSyncs, "optstate_job_disk_syncs_total", kCounter,
     "Syncs of a directory's files that succeeded."},
    {Metric::kJobDiskErrors, "optstate_job_disk_errors_total", kCounter,
     "Requests to a directory that failed, each attempt by itself."},
    {Metric::kJobDiskQueueDepth, "optstate_job_disk_queue_depth", kGauge,
     "Requests to a directory that are under way."},
    {Metric::kJobDiskBusy, "optstate_job_disk_busy_seconds_total", kCounter,
     "Time in which some request to a directory was under way."},
    {Metric::kJobDiskRecords, "optstate_job_disk_records", kGauge,
     "Records of the job."},
    {Metric::kJobDiskFrames, "optstate_job_disk_frames", kGauge,
     "Records that the job's memory has room for."},
    {Metric::kJobDiskFramesBytes, "optstate_job_disk_frames_bytes", kGauge,
     "Bytes of that memory."},
    {Metric::kJobDiskDurableStep, "optstate_job_disk_durable_step", kGauge,
     "The last step that survives a reboot."},
    {Metric::kJobDiskDamagedRecords, "optstate_job_disk_damaged_records",
     kGauge, "Damaged records that the last verification found."},
    {Metric::kJobDiskVerifiedTime,
     "optstate_job_disk_verified_timestamp_seconds", kGauge,
     "When that verification ended, in seconds since 1970. Absent: there was "
     "none."},
    {Metric::kJobDiskScrubs, "optstate_job_disk_scrubs_total", kCounter,
     "Verifications by the engine itself that looked at every record."},
    {Metric::kJobDiskStepWait, "optstate_job_disk_step_wait_seconds", kGauge,
     "The part of the last step in which an update waited for a record."},
    {Metric::kJobParameterFetches, "optstate_job_parameter_fetches_total",
     kCounter,
     "Parameters on disk that were fetched, by where their bytes were."},

    {Metric::kJobDeviceElements, "optstate_job_device_elements_total", kCounter,
     "Elements that a device has updated."},
    {Metric::kJobCpuElements, "optstate_job_cpu_elements_total", kCounter,
     "Elements that the CPU has updated, of a job that uses devices."},
    {Metric::kJobDeviceCopiedBytes, "optstate_job_device_copied_bytes_total",
     kCounter, "Bytes copied between the host and a device."},
    {Metric::kJobDeviceBufferBytes, "optstate_job_device_buffer_bytes", kGauge,
     "Bytes of a device that the job has for batches."},
    {Metric::kJobDeviceResidentBytes, "optstate_job_device_resident_bytes",
     kGauge, "Bytes of a device that the job has for records that stay there."},
    {Metric::kJobDeviceLost, "optstate_job_device_lost", kGauge,
     "1 when a device failed and does no more for the job's engine."},

    {Metric::kConnectionsAccepted, "optstate_connections_accepted_total",
     kCounter, "Connections that the daemon has accepted."},
    {Metric::kConnectionsRefused, "optstate_connections_refused_total",
     kCounter, "Connections that were refused, by the code of the answer."},
    {Metric::kSessionsStarted, "optstate_sessions_started_total", kCounter,
     "Sessions that were handed over to an engine."},
    {Metric::kAdminCalls, "optstate_admin_calls_total", kCounter,
     "Calls of operators, by the code of the answer."},
    {Metric::kEngineStarts, "optstate_engine_starts_total", kCounter,
     "Engines that the daemon has started, or found running."},
    {Metric::kEngineExits, "optstate_engine_exits_total", kCounter,
     "Engines that have ended, by why."},
    {Metric::kEngineKills, "optstate_engine_kills_total", kCounter,
     "Engines that were killed because they did not start or stop in time."},
    {Metric::kLogLinesLeftOut, "optstate_log_lines_left_out_total", kCounter,
     "Lines of the daemon's log that came too often to be written."},
    {Metric::kQueueDepth, "optstate_queue_depth", kGauge,
     "Connections that have not said what they want, or wait for an engine, "
     "and removals of deleted jobs' files."},
};

constexpr bool IsInOrder() {
  for (size_t i = 0; i < std::size(kMetrics); ++i) {
    if (static_cast<size_t>(kMetrics[i].metric) != i) return false;
  }
  return std::size(kMetrics) == static_cast<size_t>(Metric::kEnd);
}
static_assert(IsInOrder(), "a metric has no row, or stands in another's place");

}  // namespace

absl::Span<const MetricInfo> AllMetrics() { return kMetrics; }

const MetricInfo& InfoOf(Metric metric) {
  return kMetrics[static_cast<size_t>(metric)];
}

}  // namespace optstate::metrics
