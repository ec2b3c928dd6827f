#include "client/ctl/sleep_text.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/output.h"

namespace optstate::ctl {
namespace {

std::string RateText(uint64_t bytes, absl::Duration elapsed) {
  const double s = absl::ToDoubleSeconds(elapsed);
  if (bytes == 0 || s <= 0) return "";
  return absl::StrCat(
      " at ", HumanBytes(static_cast<uint64_t>(static_cast<double>(bytes) / s)),
      "/s");
}

}  // namespace

std::string SleepProgressText(SleepVerb verb, const std::string& job,
                              const v1::SleepProgress& progress,
                              absl::Duration elapsed) {
  std::string text = verb == SleepVerb::kSleep
                         ? absl::StrCat("putting job ", job, " to sleep")
                         : absl::StrCat("waking job ", job);
  if (progress.bytes_total() == 0) return text;
  const auto done = static_cast<double>(progress.bytes());
  const auto total = static_cast<double>(progress.bytes_total());
  absl::StrAppendFormat(&text, ": %.0f%%, %s of %s%s", done * 100 / total,
                        HumanBytes(progress.bytes()),
                        HumanBytes(progress.bytes_total()),
                        RateText(progress.bytes(), elapsed));
  if (progress.bytes() == 0) return text;
  absl::StrAppendFormat(&text, ", %.0f s left",
                        absl::ToDoubleSeconds(elapsed) * (total - done) / done);
  return text;
}

std::string SleepResultText(SleepVerb verb, const std::string& job,
                            const v1::SleepProgress& progress,
                            absl::Duration elapsed) {
  const std::string copied =
      absl::StrCat(HumanBytes(progress.bytes()), " copied",
                   RateText(progress.bytes(), elapsed));
  if (verb == SleepVerb::kWake) {
    return absl::StrCat("job ", job, " is awake: ", copied, ", it takes ",
                        HumanBytes(progress.memory_bytes()), " of memory");
  }
  return absl::StrCat("job ", job, " is asleep in ", progress.directory(), ": ",
                      copied, ", ", HumanBytes(progress.memory_bytes()),
                      " of memory given back. `optctl wake ", job,
                      "` wakes it");
}

std::string SleepStateText(const v1::SleepState& sleep) {
  if (sleep.directory().empty()) return sleep.progress();
  std::string text = absl::StrCat(
      sleep.directory(), ", ", HumanBytes(sleep.disk_bytes()), " there, ",
      HumanBytes(sleep.memory_bytes()), " of memory when it wakes");
  if (sleep.has_since()) {
    absl::StrAppend(&text, "; since ", HumanTime(sleep.since()));
  }
  if (!sleep.progress().empty()) absl::StrAppend(&text, "; ", sleep.progress());
  return text;
}

}  // namespace optstate::ctl
