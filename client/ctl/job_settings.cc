#include "client/ctl/job_settings.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/ctl/output.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

constexpr std::array<std::pair<absl::string_view, double>, 6> kByteUnits = {{
    {"", 1},
    {"b", 1},
    {"kib", 1024.0},
    {"mib", 1048576.0},
    {"gib", 1073741824.0},
    {"tib", 1099511627776.0},
}};
constexpr std::array<std::pair<absl::string_view, double>, 6> kMsUnits = {{
    {"", 1000},
    {"ms", 1},
    {"s", 1000},
    {"m", 60'000},
    {"min", 60'000},
    {"h", 3'600'000},
}};

// Returns the value of "1.5 GiB" in the unit of 1; nothing: it is not a
// positive number with such a unit, or more than `max`.
template <typename Units>
std::optional<uint64_t> ParseQuantity(absl::string_view text,
                                      const Units& units, double max) {
  text = absl::StripAsciiWhitespace(text);
  const size_t end = text.find_first_not_of("0123456789.");
  const absl::string_view number = text.substr(0, end);
  const std::string unit = absl::AsciiStrToLower(absl::StripAsciiWhitespace(
      end == absl::string_view::npos ? "" : text.substr(end)));
  double value = 0;
  if (!absl::SimpleAtod(number, &value)) return std::nullopt;
  for (const auto& [name, factor] : units) {
    if (unit != name) continue;
    const double all = std::floor(value * factor);
    if (all < 1 || all > max) return std::nullopt;
    return static_cast<uint64_t>(all);
  }
  return std::nullopt;
}

absl::Status SetBudget(absl::string_view value, v1::SetJobRequest* request) {
  const std::optional<uint64_t> bytes = ParseBytes(value);
  if (!bytes.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("host_budget is \"", value,
                     "\": give bytes, or a text such as 64MiB or 1.5GiB"));
  }
  request->set_host_budget_bytes(*bytes);
  return absl::OkStatus();
}

absl::Status SetDurability(absl::string_view value,
                           v1::SetJobRequest* request) {
  const std::vector<std::string> words =
      absl::StrSplit(value, ' ', absl::SkipEmpty());
  const std::string kind = words.empty() ? "" : words[0];
  const std::string rest =
      std::string(absl::StripAsciiWhitespace(absl::string_view(value).substr(
          std::min(value.size(), value.find(kind) + kind.size()))));
  constexpr double kUint32Max = 4294967295.0;
  uint32_t steps = 0;
  if (rest.empty() && (kind == "step" || kind == "none")) {
    request->set_durability(kind == "step" ? v1::DURABILITY_KIND_STEP
                                           : v1::DURABILITY_KIND_NONE);
    return absl::OkStatus();
  }
  if (kind == "every" && absl::SimpleAtoi(rest, &steps) && steps > 0) {
    request->set_durability(v1::DURABILITY_KIND_EVERY);
    request->set_every_steps(steps);
    return absl::OkStatus();
  }
  const auto ms = ParseQuantity(rest, kMsUnits, kUint32Max);
  if (kind == "interval" && ms.has_value()) {
    request->set_durability(v1::DURABILITY_KIND_INTERVAL);
    request->set_interval_ms(static_cast<uint32_t>(*ms));
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("durability is \"", value,
                   "\": give step, \"every 50\", \"interval 30s\" or none"));
}

absl::Status SetOffloadFraction(absl::string_view value,
                                v1::SetJobRequest* request) {
  double fraction = 0;
  if (!absl::SimpleAtod(value, &fraction) || !(fraction >= 0) || fraction > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("offload_fraction is \"", value,
                     "\": give the part of the elements that the CPU updates, "
                     "from 0 to 1; or auto, by itself"));
  }
  request->set_offload_fraction(fraction);
  return absl::OkStatus();
}

// 0 turns it off.
absl::Status SetDeviceBudget(absl::string_view value,
                             v1::SetJobRequest* request) {
  const std::optional<uint64_t> bytes = absl::StripAsciiWhitespace(value) == "0"
                                            ? std::optional<uint64_t>(0)
                                            : ParseBytes(value);
  if (!bytes.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("device_budget is \"", value,
                     "\": give bytes of each device, or a text such as 64MiB "
                     "or 1.5GiB; 0: no records stay there"));
  }
  request->set_device_budget_bytes(*bytes);
  return absl::OkStatus();
}

absl::Status SetWeights(absl::string_view value, v1::SetJobRequest* request) {
  if (value == "auto") {
    request->set_directory_weights_auto(true);
    return absl::OkStatus();
  }
  for (const absl::string_view word : absl::StrSplit(value, ',')) {
    uint32_t weight = 0;
    if (!absl::SimpleAtoi(word, &weight)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "directory_weights is \"", value,
          "\": give a number for each directory, such as 3,1 (0: it gets no "
          "records), or auto"));
    }
    request->add_directory_weights(weight);
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<uint64_t> ParseBytes(absl::string_view text) {
  constexpr double kBytesMax = 1152921504606846976.0;  // 1 EiB
  return ParseQuantity(text, kByteUnits, kBytesMax);
}

absl::StatusOr<v1::SetJobRequest> ParseJobSettings(
    const std::string& job, absl::Span<const std::string> words) {
  v1::SetJobRequest request;
  request.set_name(job);
  for (const std::string& word : words) {
    const std::pair<std::string, std::string> setting =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (setting.first == "host_budget") {
      OPTSTATE_RETURN_IF_ERROR(SetBudget(setting.second, &request));
    } else if (setting.first == "durability") {
      OPTSTATE_RETURN_IF_ERROR(SetDurability(setting.second, &request));
    } else if (setting.first == "offload_fraction") {
      OPTSTATE_RETURN_IF_ERROR(SetOffloadFraction(setting.second, &request));
    } else if (setting.first == "device_budget") {
      OPTSTATE_RETURN_IF_ERROR(SetDeviceBudget(setting.second, &request));
    } else if (setting.first == "directory_weights") {
      OPTSTATE_RETURN_IF_ERROR(SetWeights(setting.second, &request));
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", word,
          "\" sets nothing that a job has; there are: host_budget=BYTES, "
          "durability=WHEN, directory_weights=WEIGHTS, "
          "offload_fraction=0..1, device_budget=BYTES; and by themselves "
          "group=NAME, private=true or false, readers=NAMES"));
    }
  }
  return request;
}

std::string DurabilityText(const v1::StorageSettings& storage) {
  switch (storage.durability()) {
    case v1::DURABILITY_KIND_STEP:
      return "each step";
    case v1::DURABILITY_KIND_EVERY:
      return absl::StrCat("every ", storage.every_steps(), " steps");
    case v1::DURABILITY_KIND_INTERVAL:
      return absl::StrFormat("every %.1f s", storage.interval_ms() / 1e3);
    default:
      return "none";
  }
}

std::string OffloadText(double fraction) {
  return absl::StrFormat(
      "%.4g%% of elements updated by the CPU, %.4g%% by devices",
      100 * fraction, 100 * (1 - fraction));
}

std::string ResidentText(uint64_t elements, uint64_t bytes) {
  return absl::StrCat(HumanCount(elements), " elements, ", HumanBytes(bytes));
}

std::string JobSettingsText(const v1::SetJobReply& reply) {
  const v1::StorageSettings& storage = reply.storage();
  std::string text;
  if (storage.placement() == v1::PLACEMENT_NVME) {
    text =
        absl::StrCat("host_budget ", HumanBytes(storage.host_budget_bytes()),
                     ", which is ", std::min(reply.frames(), reply.records()),
                     " of ", reply.records(), " records of up to ",
                     HumanBytes(reply.frame_bytes()), " in memory at once; ");
  }
  absl::StrAppend(&text, "durability: ", DurabilityText(storage));
  if (storage.has_offload_fraction()) {
    absl::StrAppend(&text, "; ", OffloadText(storage.offload_fraction()));
  }
  if (storage.device_budget_bytes() > 0) {
    absl::StrAppend(&text, "; device_budget ",
                    HumanBytes(storage.device_budget_bytes()),
                    " of each device, where records stay");
  }
  if (storage.directories() > 1) {
    absl::StrAppend(
        &text, "; ", storage.directories(), " directories, ",
        storage.directory_weights().empty()
            ? "in equal parts"
            : absl::StrCat("by weights ",
                           absl::StrJoin(storage.directory_weights(), ",")));
  } else if (reply.moved_bytes() > 0) {
    absl::StrAppend(&text, "; 1 directory");
  }
  if (reply.moved_bytes() == 0) return text;
  return absl::StrCat(
      text, ": ", HumanBytes(reply.moved_bytes()),
      " written anew, for which training waited ",
      absl::StrFormat("%.1f s", static_cast<double>(reply.moved_ms()) / 1e3));
}

}  // namespace optstate::ctl
