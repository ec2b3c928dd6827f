#ifndef OPTSTATE_SERVER_CONFIG_COMMAND_LINE_H_
#define OPTSTATE_SERVER_CONFIG_COMMAND_LINE_H_

#include <optional>
#include <string>
#include <vector>

#include "server/config/config.h"

namespace optstate::config {

// The exit status of a wrong command line.
inline constexpr int kExitUsage = 2;

// The command line of optstated, as one of its processes was started.
struct CommandLine {
  std::string config_file;
  bool check_config = false;
  std::string
      format_device;  // DIR,device=DEVICE; empty: no device is formatted
  bool force = false;
  ConfigFlags config;

  // The fields below come from another process of optstated; see own_flags.h.
  int lifeline_fd = -1;
  std::string engine_job;  // empty: this process is no engine
  int engine_config_fd = -1;
  int engine_socket_fd = -1;
  bool format_versions = false;
  int handover_fd = -1;

  // All arguments but the handover's: the last upgrade's does not hold for the
  // next.
  std::vector<std::string> arguments;
};

// Parses the command line into `line`. Returns the exit status, having printed
// the reason, when the process has nothing else to do: a mistake, --help,
// --version. Throws only what libraries throw.
std::optional<int> ParseCommandLine(int argc, char** argv, CommandLine* line);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_COMMAND_LINE_H_
