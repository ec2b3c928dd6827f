#include "server/metrics/node_samples.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/metrics/job_samples.h"
#include "server/metrics/report_time.h"
#include "server/metrics/shown_jobs.h"

namespace optstate::metrics {
namespace {

constexpr char kMemory[] = "memory";
constexpr char kDisk[] = "disk";

void AddStatus(const v1::ServerStatus& status, Samples* samples) {
  const auto add = [samples](Metric metric, uint64_t value) {
    samples->Add(metric, static_cast<double>(value));
  };
  samples->Add(Metric::kBuildInfo, 1,
               {{"version", status.version()},
                {"protocol", absl::StrCat(status.protocol_version())}});
  samples->Add(Metric::kStartTime, SecondsOf(status.started_at()));
  add(Metric::kDraining, status.draining() ? 1 : 0);
  add(Metric::kUpgradeRunning,
      status.has_upgrade() && !status.upgrade().done() ? 1 : 0);
  add(Metric::kUpdateThreads, status.workers());
  add(Metric::kJobsUnanswered, static_cast<uint64_t>(status.unanswered_size()));
  add(Metric::kSessions, status.session_count());
  add(Metric::kStateBytes, status.state_bytes());
  if (status.has_state_bytes_available()) {
    add(Metric::kStateAvailableBytes, status.state_bytes_available());
  }
  add(Metric::kMemoryLockedBytes, status.memory_lock().locked_bytes());
  add(Metric::kMemoryLockPendingBytes, status.memory_lock().pending_bytes());
  add(Metric::kMemoryUnlockedBytes, status.memory_lock().unlocked_bytes());
}

void AddPhases(const v1::NodeReport& report, Samples* samples) {
  std::map<v1::JobPhase, int> jobs;
  for (const v1::Job& job : report.jobs()) ++jobs[job.phase()];
  for (const v1::JobPhase phase : kPhases) {
    samples->Add(Metric::kJobs, jobs[phase],
                 {{"phase", std::string(PhaseName(phase))}});
  }
}

// Adds the bytes of those jobs that have samples.
template <typename Jobs>
void AddJobsOfTier(const Jobs& jobs, const std::set<std::string>& shown,
                   const Labels& tier, Samples* samples) {
  for (const v1::TierJob& job : jobs) {
    if (!shown.contains(job.job())) continue;
    Labels labels = {{"job_name", job.job()}};
    labels.insert(labels.end(), tier.begin(), tier.end());
    samples->Add(Metric::kJobTierBytes, static_cast<double>(job.bytes()),
                 std::move(labels));
  }
}

void AddBandwidth(const Labels& tier, const char* direction, double bytes_per_s,
                  Samples* samples) {
  if (bytes_per_s == 0) return;
  Labels labels = tier;
  labels.push_back({"direction", direction});
  samples->Add(Metric::kTierBandwidth, bytes_per_s, std::move(labels));
}

void AddMemory(const v1::MemoryTier& memory, const std::set<std::string>& shown,
               Samples* samples) {
  const Labels tier = {{"tier", kMemory}, {"directory", memory.directory()}};
  const auto add = [&](Metric metric, uint64_t value) {
    samples->Add(metric, static_cast<double>(value), tier);
  };
  add(Metric::kTierUp, memory.capacity_bytes() != 0 ? 1 : 0);
  add(Metric::kTierCapacityBytes, memory.capacity_bytes());
  add(Metric::kTierUsedBytes, memory.used_bytes());
  if (memory.has_free_bytes()) add(Metric::kTierFreeBytes, memory.free_bytes());
  AddBandwidth(tier, "mixed", memory.bytes_per_s(), samples);
  samples->Add(Metric::kFramesBytes,
               static_cast<double>(memory.frames_bytes()));
  if (memory.budget_bytes() != 0) {
    samples->Add(Metric::kFramesBudgetBytes,
                 static_cast<double>(memory.budget_bytes()));
  }
  AddJobsOfTier(memory.jobs(), shown, tier, samples);
}

void AddDirectory(const v1::DirectoryTier& directory,
                  const std::set<std::string>& shown, Samples* samples) {
  const Labels tier = {{"tier", kDisk}, {"directory", directory.directory()}};
  const auto add = [&](Metric metric, uint64_t value) {
    samples->Add(metric, static_cast<double>(value), tier);
  };
  // It may also have a problem that concerns its measurement alone.
  const bool is_up = directory.capacity_bytes() != 0;
  add(Metric::kTierUp, is_up ? 1 : 0);
  if (is_up) {
    add(Metric::kTierCapacityBytes, directory.capacity_bytes());
    add(Metric::kTierUsedBytes, directory.used_bytes());
    add(Metric::kTierFreeBytes, directory.free_bytes());
  }
  if (directory.limit_bytes() != 0) {
    add(Metric::kTierLimitBytes, directory.limit_bytes());
  }
  AddBandwidth(tier, "read", directory.read_bytes_per_s(), samples);
  AddBandwidth(tier, "write", directory.write_bytes_per_s(), samples);
  AddBandwidth(tier, "mixed", directory.mixed_bytes_per_s(), samples);
  AddJobsOfTier(directory.jobs(), shown, tier, samples);
}

}  // namespace

void AddNode(const v1::NodeReport& report, Samples* samples) {
  AddStatus(report.status(), samples);
  AddPhases(report, samples);
  const std::vector<int> jobs = ShownJobs(report);
  const auto named =
      std::count_if(report.jobs().begin(), report.jobs().end(),
                    [](const v1::Job& job) { return !job.name().empty(); });
  samples->Add(Metric::kJobsOmitted,
               static_cast<double>(named) - static_cast<double>(jobs.size()));
  std::set<std::string> shown;
  for (const int i : jobs) {
    // The name is a label: two jobs of one name would be one series.
    if (!shown.insert(report.jobs(i).name()).second) continue;
    AddJob(report.jobs(i), samples);
  }
  if (report.tiers().has_memory()) {
    AddMemory(report.tiers().memory(), shown, samples);
  }
  for (const v1::DirectoryTier& directory : report.tiers().directories()) {
    AddDirectory(directory, shown, samples);
  }
  for (const v1::DeviceReport& device : report.devices().devices()) {
    samples->Add(Metric::kDeviceMemoryBytes,
                 static_cast<double>(device.memory_bytes()),
                 {{"device", absl::StrCat(device.index())},
                  {"device_name", device.name()}});
  }
}

}  // namespace optstate::metrics
