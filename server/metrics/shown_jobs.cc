#include "server/metrics/shown_jobs.h"

#include <algorithm>

namespace optstate::metrics {
namespace {

// The reasons to show a job; the least value comes first.
enum class Urgency { kFailed, kUnanswered, kRecovering, kAttached, kOther };

Urgency UrgencyOf(const v1::Job& job) {
  if (job.phase() == v1::JOB_PHASE_FAILED) return Urgency::kFailed;
  if (job.ranks_unknown() || job.phase() == v1::JOB_PHASE_UNSPECIFIED) {
    return Urgency::kUnanswered;
  }
  if (job.phase() == v1::JOB_PHASE_RECOVERING) return Urgency::kRecovering;
  if (job.session_count() > 0) return Urgency::kAttached;
  return Urgency::kOther;
}

}  // namespace

std::vector<int> ShownJobs(const v1::NodeReport& report) {
  std::vector<int> shown;
  for (int i = 0; i < report.jobs_size(); ++i) {
    if (!report.jobs(i).name().empty()) shown.push_back(i);
  }
  if (shown.size() <= kJobsMax) return shown;
  std::stable_sort(shown.begin(), shown.end(), [&report](int a, int b) {
    const v1::Job& left = report.jobs(a);
    const v1::Job& right = report.jobs(b);
    const Urgency urgency = UrgencyOf(left);
    const Urgency other = UrgencyOf(right);
    return urgency != other ? urgency < other : left.name() < right.name();
  });
  shown.resize(kJobsMax);
  std::sort(shown.begin(), shown.end());
  return shown;
}

}  // namespace optstate::metrics
