#ifndef OPTSTATE_CLIENT_CTL_PROGRESS_TEXT_H_
#define OPTSTATE_CLIENT_CTL_PROGRESS_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/ctl/chrome_trace.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// Returns where a trace of so many steps is, with its rate and the time left.
// `elapsed`: the time since the first thing that it showed.
std::string TraceProgressText(const std::string& job, const ChromeTrace& trace,
                              uint32_t steps_asked, absl::Duration elapsed);

// Returns how many engines an upgrade has replaced, with its rate and the time
// left. Jobs without an engine count among the daemon's jobs, and none is
// replaced for them, so that the time is the most. `elapsed`: the time since
// the upgrade began.
std::string UpgradeProgressText(const v1::ServerStatus& status,
                                absl::Duration elapsed);

// Returns what the deletion of a job waits for, or how much is removed, with
// its rate and the time left. `elapsed`: the time since the first byte.
std::string DeleteProgressText(const std::string& job,
                               const v1::DeleteProgress& progress,
                               absl::Duration elapsed);

// Returns which part of a bug report is being fetched, the first one being 1,
// the bytes of all before it, and the time left if further parts take as long.
// `elapsed`: the time since the first one began.
std::string BugReportProgressText(absl::string_view part, uint64_t number,
                                  uint64_t parts, uint64_t bytes,
                                  absl::Duration elapsed);

// Returns how many of the directories on disks are measured, and the time left
// at 2 s each. `before`: as they were when that began.
std::string MeasureProgressText(const v1::DescribeTiersReply& before,
                                const v1::DescribeTiersReply& now);

// Returns what a drain waits for, and how long at the most from now on. `jobs`:
// all jobs, as they are now; null: that is not known.
std::string DrainProgressText(const v1::ListJobsReply* jobs,
                              absl::Duration left);

// Returns how far the engine of a job is that is started again, as the job says
// it: the records that it has read, with the rate and the time left.
// `read_max`: the bytes of the job on disks, of which it reads a part; 0: not
// known. `elapsed`: the time since the first byte; `left`: until optctl gives
// up.
std::string RecoverProgressText(const v1::Job& job, uint64_t read_max,
                                absl::Duration elapsed, absl::Duration left);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_PROGRESS_TEXT_H_
