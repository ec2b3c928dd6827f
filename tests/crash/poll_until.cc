#include "tests/crash/poll_until.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace optstate::crash {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(90);
constexpr absl::Duration kInterval = absl::Microseconds(50);

}  // namespace

absl::Status PollUntil(absl::string_view what, absl::FunctionRef<bool()> done) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (!done()) {
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          "waited ", absl::FormatDuration(kPatience), " for ", what));
    }
    absl::SleepFor(kInterval);
  }
  return absl::OkStatus();
}

}  // namespace optstate::crash
