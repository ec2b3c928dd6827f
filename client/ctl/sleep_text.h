#ifndef OPTSTATE_CLIENT_CTL_SLEEP_TEXT_H_
#define OPTSTATE_CLIENT_CTL_SLEEP_TEXT_H_

#include <string>

#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

enum class SleepVerb { kSleep, kWake };

// Texts of a job's way to sleep, or awake, for people; one line each, without
// its end.

// Says how far it has come, how fast it is, and how long it will take.
std::string SleepProgressText(SleepVerb verb, const std::string& job,
                              const v1::SleepProgress& progress,
                              absl::Duration elapsed);
std::string SleepResultText(SleepVerb verb, const std::string& job,
                            const v1::SleepProgress& progress,
                            absl::Duration elapsed);
// Says in `optctl describe job` where a job sleeps.
std::string SleepStateText(const v1::SleepState& sleep);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_SLEEP_TEXT_H_
