#include "client/ctl/since.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace optstate::ctl {
namespace {

constexpr absl::Duration kSinceMax = absl::Hours(24 * 366 * 10);

}  // namespace

absl::StatusOr<absl::Duration> ParseSince(absl::string_view text) {
  absl::Duration since;
  absl::string_view days_text = text;
  uint32_t days = 0;
  const bool is_days = absl::ConsumeSuffix(&days_text, "d") &&
                       absl::SimpleAtoi(days_text, &days);
  if (is_days) since = absl::Hours(24) * days;
  if ((!is_days && !absl::ParseDuration(text, &since)) ||
      since <= absl::ZeroDuration() || since > kSinceMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", text, "\" is no time to look back: use 90s, 10m, 1h30m or 2d"));
  }
  return since;
}

std::string CheckSince(const std::string& text) {
  return std::string(ParseSince(text).status().message());
}

}  // namespace optstate::ctl
