#include "server/config/device_setting.h"

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace optstate::config {

absl::StatusOr<DeviceSetting> ParseDeviceSetting(absl::string_view text) {
  constexpr size_t kEmulatedMax = 16;
  if (text == "none") return DeviceSetting{};
  if (text == "cuda") return DeviceSetting{.kind = DeviceKind::kCuda};
  DeviceSetting setting = {.kind = DeviceKind::kEmulated, .emulated = 1};
  if (text == "emulated") return setting;
  absl::string_view number = text;
  if (absl::ConsumePrefix(&number, "emulated:") &&
      absl::SimpleAtoi(number, &setting.emulated) && setting.emulated >= 1 &&
      setting.emulated <= kEmulatedMax) {
    return setting;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text, "\" is none of none, cuda, emulated and ",
                   "emulated:N, with N from 1 to ", kEmulatedMax));
}

}  // namespace optstate::config
