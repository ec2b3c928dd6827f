#ifndef OPTSTATE_SERVER_CONFIG_DEVICE_SETTING_H_
#define OPTSTATE_SERVER_CONFIG_DEVICE_SETTING_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::config {

enum class DeviceKind : uint8_t { kNone, kCuda, kEmulated };

struct DeviceSetting {
  DeviceKind kind = DeviceKind::kNone;
  size_t emulated = 0;  // how many are emulated
};

// Reads the `devices` of the configuration: "none", "cuda", "emulated" or
// "emulated:N". INVALID_ARGUMENT: it is none of these, or N not in [1, 16].
absl::StatusOr<DeviceSetting> ParseDeviceSetting(absl::string_view text);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_DEVICE_SETTING_H_
