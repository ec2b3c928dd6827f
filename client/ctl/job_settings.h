#ifndef OPTSTATE_CLIENT_CTL_JOB_SETTINGS_H_
#define OPTSTATE_CLIENT_CTL_JOB_SETTINGS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// Returns the request that sets what the words say, as a script would write it:
// "host_budget=8GiB", "durability=every 50". INVALID_ARGUMENT names the word
// that is wrong, and what could stand there.
absl::StatusOr<v1::SetJobRequest> ParseJobSettings(
    const std::string& job, absl::Span<const std::string> words);

// Returns the bytes of a text such as "64MiB" or "1.5 GiB"; nothing: it is
// none.
std::optional<uint64_t> ParseBytes(absl::string_view text);

// "each step", "every 50 steps", "every 1.5 s", "none".
std::string DurabilityText(const v1::StorageSettings& storage);

// Returns "30% of elements updated by the CPU, 70% by devices" of 0.3.
std::string OffloadText(double fraction);

// Returns "12.3M elements, 147.0 MiB" of what stays on devices.
std::string ResidentText(uint64_t elements, uint64_t bytes);

// Returns what is in force: "host_budget 8.0 GiB: 12 of 40 records in memory".
std::string JobSettingsText(const v1::SetJobReply& reply);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_JOB_SETTINGS_H_
