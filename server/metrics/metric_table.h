#ifndef OPTSTATE_SERVER_METRICS_METRIC_TABLE_H_
#define OPTSTATE_SERVER_METRICS_METRIC_TABLE_H_

#include <prometheus/metric_type.h>

#include <cstddef>

#include "absl/types/span.h"

namespace optstate::metrics {

// Every metric that the daemon has. Its names and help texts stand in
// metric_table.cc and nowhere else.
enum class Metric : size_t {
  // The node.
  kBuildInfo,
  kStartTime,
  kDraining,
  kUpgradeRunning,
  kUpdateThreads,
  kJobs,
  kJobsUnanswered,
  kJobsOmitted,
  kSessions,
  kStateBytes,
  kStateAvailableBytes,
  kMemoryLockedBytes,
  kMemoryLockPendingBytes,
  kMemoryUnlockedBytes,
  // Tiers.
  kTierUp,
  kTierCapacityBytes,
  kTierUsedBytes,
  kTierFreeBytes,
  kTierLimitBytes,
  kTierBandwidth,
  kFramesBytes,
  kFramesBudgetBytes,
  kDeviceMemoryBytes,
  // One job.
  kJobUp,
  kJobPhase,
  kJobSessions,
  kJobRanks,
  kJobElements,
  kJobStateBytes,
  kJobTierBytes,
  kJobCommittedStep,
  kJobCommittedTime,
  kJobSkippedSteps,
  kJobRecoveredSteps,
  kJobRolledBackRuns,
  kJobEngineRestarts,
  kJobStepPhase,
  kJobUpdateBandwidth,
  kJobMemoryShare,
  kJobMemoryLockedBytes,
  kJobMemoryUnlockedBytes,
  kJobSpeculatedSteps,
  kJobSpeculatedStepsRolledBack,
  kJobWireBytes,
  kJobRequestsRefused,
  kJobQueueDepth,
  // Its records on disk.
  kJobDiskReadBytes,
  kJobDiskWrittenBytes,
  kJobDiskReads,
  kJobDiskWrites,
  kJobDiskSyncs,
  kJobDiskErrors,
  kJobDiskQueueDepth,
  kJobDiskBusy,
  kJobDiskRecords,
  kJobDiskFrames,
  kJobDiskFramesBytes,
  kJobDiskDurableStep,
  kJobDiskDamagedRecords,
  kJobDiskVerifiedTime,
  kJobDiskScrubs,
  kJobDiskStepWait,
  kJobParameterFetches,
  // Its devices.
  kJobDeviceElements,
  kJobCpuElements,
  kJobDeviceCopiedBytes,
  kJobDeviceBufferBytes,
  kJobDeviceResidentBytes,
  kJobDeviceLost,
  // Counts of the supervisor.
  kConnectionsAccepted,
  kConnectionsRefused,
  kSessionsStarted,
  kAdminCalls,
  kEngineStarts,
  kEngineExits,
  kEngineKills,
  kLogLinesLeftOut,
  kQueueDepth,
  kEnd
};

struct MetricInfo {
  Metric metric;
  const char* name;
  prometheus::MetricType type;
  const char* help;
};

// The metrics in the order of their numbers, in which they are written.
absl::Span<const MetricInfo> AllMetrics();
const MetricInfo& InfoOf(Metric metric);

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_METRIC_TABLE_H_
