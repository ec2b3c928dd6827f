#ifndef OPTSTATE_SERVER_CONFIG_CONFIG_H_
#define OPTSTATE_SERVER_CONFIG_CONFIG_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/config.pb.h"

namespace optstate::config {

// The parts of the environment that the default paths depend on.
struct ConfigEnvironment {
  uid_t uid = 0;
  std::string xdg_runtime_dir;  // empty: unset
};

ConfigEnvironment CurrentConfigEnvironment();

// Returns the defaults of all settings.
v1::DaemonConfig DefaultConfig(const ConfigEnvironment& environment);

// Values given on the command line; empty: not given.
struct ConfigFlags {
  std::string state_dir;
  std::string socket;
  std::vector<std::string> listen;
  std::string log_level;
  std::vector<std::string> nvme_directories;  // see ParseNvmeDirectory()
  std::string lock_memory;                    // auto, always or never
  std::string devices;                        // see ParseDeviceSetting()
  std::string sleep_directory;
  std::string metrics;  // see ParseListenAddress()
  bool insecure_tcp = false;
  std::string log_format;  // see LogFormatOf()
};

// Returns the format that the word, text, json or logfmt, names; UNSPECIFIED:
// none.
v1::LogFormat LogFormatOf(absl::string_view word);

// Returns INVALID_ARGUMENT, naming the flag, when a flag's value is wrong
// regardless of the file.
absl::Status CheckFlags(const ConfigFlags& flags);

// Merges the defaults, then the file (empty: none), then the flags.
// INVALID_ARGUMENT naming FILE:LINE or the flag; NOT_FOUND or PERMISSION_DENIED
// when the file cannot be read. Users and groups with a quota are looked up.
absl::StatusOr<v1::DaemonConfig> LoadConfig(
    const std::string& file, const ConfigFlags& flags,
    const ConfigEnvironment& environment);

// Does the same for a file's text.
absl::StatusOr<v1::DaemonConfig> ParseConfig(
    absl::string_view text, absl::string_view file, const ConfigFlags& flags,
    const ConfigEnvironment& environment);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_CONFIG_H_
