#include "client/ctl/verify_text.h"

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

std::string VerifyProgressText(const std::string& job,
                               const v1::VerifyJobProgress& progress,
                               absl::Duration elapsed) {
  if (progress.records_total() == 0) {
    return absl::StrCat("verifying job ", job);
  }
  const auto done = static_cast<double>(progress.records());
  const auto total = static_cast<double>(progress.records_total());
  std::string text = absl::StrFormat(
      "verifying job %s: %.0f%%, %d of %d records, %s read%s, %d damaged", job,
      done * 100 / total, progress.records(), progress.records_total(),
      HumanBytes(progress.bytes_read()),
      RateText(progress.bytes_read(), elapsed), progress.damaged());
  if (progress.records() != 0) {
    absl::StrAppendFormat(
        &text, ", %.0f s left",
        absl::ToDoubleSeconds(elapsed) * (total - done) / done);
  }
  return text;
}

std::string DamageText(const v1::RecordDamage& damage) {
  std::string what;
  switch (damage.kind()) {
    case v1::DAMAGE_KIND_STATE:
      what = absl::StrCat("tile ", damage.tile(), " differs");
      break;
    case v1::DAMAGE_KIND_PARAMETERS:
      what = "its parameters differ";
      break;
    default:
      what = absl::StrCat("it was not read (", damage.reason(), ")");
  }
  return absl::StrCat("damaged: ", damage.file(), ", record of ",
                      damage.bytes(), " bytes at byte ", damage.offset_bytes(),
                      ", parameters \"", damage.first_parameter(), "\" to \"",
                      damage.last_parameter(), "\": ", what);
}

std::string VerifyResultText(const std::string& job,
                             const v1::VerifyJobProgress& progress,
                             absl::Duration elapsed) {
  std::string text = absl::StrCat(
      "job ", job, ": ", progress.records(), " records, ",
      HumanBytes(progress.bytes_read()), " read",
      RateText(progress.bytes_read(), elapsed), ", ", progress.skipped(),
      " with nothing on disk that is to survive, ");
  if (progress.damaged() == 0) return text + "no damage";
  absl::StrAppend(&text, progress.damaged(), " DAMAGED");
  const auto named = static_cast<uint64_t>(progress.damages_size());
  if (named < progress.damaged()) {
    absl::StrAppend(&text, ", of which the first ", named, " are named");
  }
  return text;
}

}  // namespace optstate::ctl
