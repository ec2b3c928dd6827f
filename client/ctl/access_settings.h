#ifndef OPTSTATE_CLIENT_CTL_ACCESS_SETTINGS_H_
#define OPTSTATE_CLIENT_CTL_ACCESS_SETTINGS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "optstate/v1/types.pb.h"

namespace optstate::ctl {

// The words of `optctl set job` that say who may use a job.
struct AccessChange {
  std::optional<std::string> group;  // empty: none
  std::optional<bool> is_private;
  std::optional<std::vector<std::string>> readers;
};

// Returns what words such as "group=research", "private=true" and
// "readers=alice,@ops" say; nothing: none of them is such a word.
// INVALID_ARGUMENT: one of them is wrong, or says something else, for who may
// use a job is set alone.
absl::StatusOr<std::optional<AccessChange>> ParseAccessChange(
    absl::Span<const std::string> words);

// Returns what the job has now with the change made. A job that is no longer
// private has no readers. INVALID_ARGUMENT: readers of a job that is not
// private.
absl::StatusOr<v1::JobAccess> ChangedAccess(const v1::JobAccess& now,
                                            const AccessChange& change);

// Returns "private; group research; readers alice, @ops", or "not private".
std::string AccessText(const v1::JobAccess& access);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_ACCESS_SETTINGS_H_
