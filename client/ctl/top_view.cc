#include "client/ctl/top_view.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/names.h"
#include "client/ctl/output.h"
#include "client/ctl/table.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// The daemon's two lines, an empty one and the titles.
constexpr size_t kLinesAboveJobs = 4;

// Returns a number that is the lower the more the job needs somebody to look.
int UrgencyOf(const v1::Job& job) {
  // The phase of a job without an answer does not count.
  if (job.ranks_unknown()) return 1;
  if (job.phase() == v1::JOB_PHASE_FAILED) return 0;
  if (job.state_unknown() || job.phase() == v1::JOB_PHASE_RECOVERING) return 1;
  if (job.session_count() == 0) return 4;
  return job.session_count() < job.world_size() ? 2 : 3;
}

std::vector<const v1::Job*> MostUrgentFirst(const v1::ListJobsReply& reply) {
  std::vector<const v1::Job*> jobs;
  for (const v1::Job& job : reply.jobs()) jobs.push_back(&job);
  // Nothing that changes with each step counts, so that rows keep their places.
  std::sort(jobs.begin(), jobs.end(), [](const v1::Job* a, const v1::Job* b) {
    return std::make_tuple(UrgencyOf(*a), b->state_bytes(), a->name()) <
           std::make_tuple(UrgencyOf(*b), a->state_bytes(), b->name());
  });
  return jobs;
}

// Returns the same job of the sample before; null: it was not there, is one
// that was made anew, or its engine did not say.
const v1::Job* FindBefore(const TopSample* before, const v1::Job& job) {
  if (before == nullptr) return nullptr;
  for (const v1::Job& of : before->jobs.jobs()) {
    if (of.name() != job.name()) continue;
    const bool is_same =
        !of.state_unknown() && !of.ranks_unknown() &&
        of.created_at().seconds() == job.created_at().seconds() &&
        of.created_at().nanos() == job.created_at().nanos() &&
        of.committed_step() <= job.committed_step();
    return is_same ? &of : nullptr;
  }
  return nullptr;
}

uint64_t DiskBytes(const v1::Job& job) {
  return job.disk().bytes_read() + job.disk().bytes_written();
}

std::string Milliseconds(uint64_t ns) {
  return absl::StrFormat("%.1f", static_cast<double>(ns) / 1e6);
}

std::string DiskRate(const v1::Job& job, const v1::Job* before, double s) {
  if (!job.has_disk()) return "-";
  // Another engine counts from 0.
  if (before == nullptr || s <= 0 || before->engine_pid() != job.engine_pid()) {
    return kUnknown;
  }
  const auto bytes = static_cast<double>(DiskBytes(job) - DiskBytes(*before));
  return absl::StrCat(HumanBytes(static_cast<uint64_t>(bytes / s)), "/s");
}

std::vector<std::string> RowOf(const v1::Job& job, const v1::Job* before,
                               double s) {
  const bool is_known = !job.ranks_unknown() && !job.state_unknown();
  const auto known = [is_known](std::string text) {
    return is_known ? std::move(text) : std::string(kUnknown);
  };
  std::string rate = kUnknown;
  if (is_known && before != nullptr && s > 0) {
    rate = absl::StrFormat(
        "%.2f",
        static_cast<double>(job.committed_step() - before->committed_step()) /
            s);
  }
  const v1::StepTimes& times = job.mean_step_times();
  const auto phase = [&](uint64_t ns) {
    return known(job.has_mean_step_times() ? Milliseconds(ns) : "-");
  };
  const std::string share =
      times.memory_share() > 0
          ? absl::StrFormat("%.0f%%", times.memory_share() * 100)
          : "-";
  return {job.name(),
          Name(job.phase()),
          job.state_unknown() ? kUnknown : absl::StrCat(job.committed_step()),
          rate,
          absl::StrCat(
              known(absl::StrCat(job.session_count())), "/",
              job.state_unknown() ? kUnknown : absl::StrCat(job.world_size())),
          phase(times.staging_ns()),
          phase(times.waiting_ns()),
          phase(times.decide_ns()),
          phase(times.update_ns()),
          phase(times.publish_ns()),
          known(share),
          HumanBytes(job.state_bytes()),
          known(DiskRate(job, before, s)),
          absl::StrCat(job.uid()),
          absl::StrCat(job.engine_restarts()),
          job.open_step().empty() ? "-" : job.open_step()};
}

std::string Header(const TopSample& now) {
  const v1::ServerStatus& status = now.status;
  return absl::StrCat(
      "optstated ", status.version(), " on ", status.host(), ", ",
      absl::FormatTime(absl::RFC3339_sec, now.at, absl::UTCTimeZone()),
      status.draining() ? ", DRAINING" : "", "\n", status.job_count(),
      " jobs, ", status.session_count(), " ranks; state ",
      HumanBytes(status.state_bytes()), " used, ",
      status.has_state_bytes_available()
          ? HumanBytes(status.state_bytes_available())
          : std::string(kUnknown),
      " left; times in ms, means of up to 16 steps\n");
}

}  // namespace

absl::StatusOr<std::string> RenderTop(const TopSample* before,
                                      const TopSample& now, bool wide,
                                      const TerminalSize& terminal) {
  Table table({{"JOB"},
               {"PHASE"},
               {"STEP", /*right=*/true},
               {"STEPS/S", true},
               {"RANKS", true},
               {"STAGING", true},
               {"WAITING", true},
               {"DECIDE", true},
               {"UPDATE", true},
               {"PUBLISH", true},
               {"MEMORY BW", true},
               {"STATE", true},
               {"DISK", true},
               {"UID", true, /*wide_only=*/true},
               {"RESTARTS", true, true},
               {"OPEN STEP", false, true}});
  const double s =
      before == nullptr ? 0 : absl::ToDoubleSeconds(now.at - before->at);
  for (const v1::Job* job : MostUrgentFirst(now.jobs)) {
    table.AddRow(RowOf(*job, FindBefore(before, *job), s));
  }
  if (table.empty()) {
    return FitToTerminal(Header(now), kLinesAboveJobs, terminal);
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::string rows, table.Render(wide));
  return FitToTerminal(absl::StrCat(Header(now), "\n", rows), kLinesAboveJobs,
                       terminal);
}

}  // namespace optstate::ctl
