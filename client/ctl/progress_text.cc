#include "client/ctl/progress_text.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "client/ctl/output.h"

namespace optstate::ctl {
namespace {

// Returns a rate and the time left, with a comma before each: "" while nothing
// is done, or no time has passed.
std::string RateText(uint64_t done, uint64_t total, absl::string_view at_most,
                     absl::Duration elapsed) {
  const double s = absl::ToDoubleSeconds(elapsed);
  if (done == 0 || s <= 0) return "";
  const double rate = static_cast<double>(done) / s;
  const uint64_t left = total > done ? total - done : 0;
  return absl::StrFormat(", %.1f a second, %s%.0f s left", rate, at_most,
                         static_cast<double>(left) / rate);
}

// The most jobs that a drain names.
constexpr size_t kAwaitedShownMax = 3;

std::string AtMostText(absl::Duration left) {
  return absl::StrFormat(
      "%.0f s more at the most",
      absl::ToDoubleSeconds(std::max(left, absl::ZeroDuration())));
}

}  // namespace

std::string TraceProgressText(const std::string& job, const ChromeTrace& trace,
                              uint32_t steps_asked, absl::Duration elapsed) {
  if (trace.steps() == 0 && trace.spans() == 0) {
    return absl::StrCat("tracing job ", job, ": waits for a step");
  }
  std::string text = absl::StrCat(
      "tracing job ", job, ": ", trace.steps(), " of ", steps_asked, " steps",
      RateText(trace.steps(), steps_asked, "", elapsed), ", ", trace.spans(),
      " spans");
  if (trace.lost_spans() != 0) {
    absl::StrAppend(&text, ", ", trace.lost_spans(), " lost");
  }
  return text;
}

std::string UpgradeProgressText(const v1::ServerStatus& status,
                                absl::Duration elapsed) {
  const uint32_t replaced = status.upgrade().engines_replaced();
  const uint32_t jobs = std::max(status.job_count(), replaced);
  return absl::StrCat("upgrading: ", replaced, " of at most ", jobs,
                      " engines replaced",
                      RateText(replaced, jobs, "at most ", elapsed));
}

std::string DeleteProgressText(const std::string& job,
                               const v1::DeleteProgress& progress,
                               absl::Duration elapsed) {
  std::string text = absl::StrCat("deleting job ", job);
  if (progress.awaits_engine()) {
    return absl::StrCat(text, ": waits for the end of its engine");
  }
  if (progress.bytes_total() == 0) return text;
  const auto done = static_cast<double>(progress.bytes());
  const auto total = static_cast<double>(progress.bytes_total());
  absl::StrAppendFormat(&text, ": %.0f%%, %s of %s", done * 100 / total,
                        HumanBytes(progress.bytes()),
                        HumanBytes(progress.bytes_total()));
  const double s = absl::ToDoubleSeconds(elapsed);
  if (done == 0 || s <= 0) return text;
  absl::StrAppendFormat(&text, " at %s/s, %.0f s left",
                        HumanBytes(static_cast<uint64_t>(done / s)),
                        s * std::max(total - done, 0.0) / done);
  return text;
}

std::string BugReportProgressText(absl::string_view part, uint64_t number,
                                  uint64_t parts, uint64_t bytes,
                                  absl::Duration elapsed) {
  return absl::StrCat("bug report: ", part, ", ", number, " of ", parts,
                      " parts, ", HumanBytes(bytes), " so far",
                      RateText(number - 1, parts, "about ", elapsed));
}

std::string MeasureProgressText(const v1::DescribeTiersReply& before,
                                const v1::DescribeTiersReply& now) {
  constexpr int kMeasuringS = 2;
  const int total = before.directories_size();
  int measured = 0;
  for (int i = 0; i < std::min(total, now.directories_size()); ++i) {
    const auto& was = before.directories(i).measured_at();
    const auto& is = now.directories(i).measured_at();
    if (is.seconds() != was.seconds() || is.nanos() != was.nanos()) ++measured;
  }
  return absl::StrCat("measuring disks: ", measured, " of ", total,
                      " directories, about ", (total - measured) * kMeasuringS,
                      " s left");
}

std::string DrainProgressText(const v1::ListJobsReply* jobs,
                              absl::Duration left) {
  std::string text =
      absl::StrCat("draining: waits for open steps, ", AtMostText(left));
  if (jobs == nullptr) return text;
  std::vector<std::string> awaited;
  for (const v1::Job& job : jobs->jobs()) {
    if (job.ranks_unknown()) {
      awaited.push_back(absl::StrCat(job.name(), " gives no answer"));
    } else if (!job.open_step().empty()) {
      awaited.push_back(absl::StrCat(job.name(), ": ", job.open_step()));
    }
  }
  const auto all = static_cast<size_t>(jobs->jobs_size());
  absl::StrAppend(&text, "; ", all - awaited.size(), " of ", all,
                  " jobs have none");
  const size_t shown = std::min(awaited.size(), kAwaitedShownMax);
  for (size_t i = 0; i < shown; ++i) absl::StrAppend(&text, "; ", awaited[i]);
  if (shown < awaited.size()) {
    absl::StrAppend(&text, "; and ", awaited.size() - shown, " more");
  }
  return text;
}

std::string RecoverProgressText(const v1::Job& job, uint64_t read_max,
                                absl::Duration elapsed, absl::Duration left) {
  std::string text = absl::StrCat("recovering job ", job.name(), ": ");
  const uint64_t read = job.engine_start().disk_bytes();
  if (read == 0) {
    return absl::StrCat(text, "its engine is being started, ",
                        AtMostText(left));
  }
  absl::StrAppend(&text, "its engine has read ", HumanBytes(read));
  const uint64_t all = std::max(read_max, read);
  if (read_max != 0) absl::StrAppend(&text, " of at most ", HumanBytes(all));
  const double s = absl::ToDoubleSeconds(elapsed);
  if (s <= 0) return text;
  const double rate = static_cast<double>(read) / s;
  absl::StrAppend(&text, " at ", HumanBytes(static_cast<uint64_t>(rate)), "/s");
  if (read_max == 0) return absl::StrCat(text, ", ", AtMostText(left));
  absl::StrAppendFormat(&text, ", at most %.0f s left",
                        static_cast<double>(all - read) / rate);
  return text;
}

}  // namespace optstate::ctl
