// optstated: the optimizer-state daemon of a node. One binary is the
// supervisor, each job's engine (--engine) and a trainer's private daemon
// (--embedded).

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "optstate/v1/config.pb.h"
#include "server/accept/activated_sockets.h"
#include "server/config/command_line.h"
#include "server/config/config.h"
#include "server/config/yaml_message.h"
#include "server/daemon.h"
#include "server/engine/engine.h"
#include "server/observe/logging.h"
#include "server/observe/peer_log.h"
#include "server/supervisor/device_formatter.h"
#include "server/upgrade/build_check.h"
#include "server/upgrade/handover.h"

namespace optstate::server {
namespace {

using config::CommandLine;

// Opens fds 0, 1 and 2 if they are closed. Otherwise the next file or socket
// opened would get such a number, and printed text would go there. Uses system
// calls alone: no sanitizer is set up yet.
__attribute__((no_sanitize("address", "thread", "undefined"))) void
OpenStandardStreams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::syscall(SYS_fcntl, fd, F_GETFD) >= 0 || errno != EBADF) continue;
    // The new fd gets the lowest free number, which is this one.
    (void)::syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR);
  }
}

// Runs before the initializers of libraries: gRPC's open a file.
__attribute__((section(".preinit_array"),
               used)) void (*const kFirst)() = OpenStandardStreams;

int Fail(const absl::Status& status, int code = 1) {
  if (observe::CurrentLogFormat() != observe::LogFormat::kText) {
    spdlog::error("{}", std::string(status.message()));
  } else {
    // The text is plain, so that it is readable before and without a log.
    std::cerr << "optstated: " << status.message() << "\n";
  }
  return code;
}

observe::LogFormat FormatOf(v1::LogFormat format) {
  switch (format) {
    case v1::LOG_FORMAT_JSON:
      return observe::LogFormat::kJson;
    case v1::LOG_FORMAT_LOGFMT:
      return observe::LogFormat::kLogfmt;
    default:
      return observe::LogFormat::kText;
  }
}

// Has this process and its libraries write the log.
void StartLog(absl::string_view process, absl::string_view level,
              v1::LogFormat format) {
  observe::SetUpLogging(process, level, FormatOf(format));
  observe::RouteGrpcLog();
  observe::RouteProtobufLog();
}

int RunEngineMode(const CommandLine& line) {
  engine::EngineOptions options;
  options.socket_fd = line.engine_socket_fd;
  if (!options.config.ParseFromFileDescriptor(line.engine_config_fd)) {
    return Fail(absl::InvalidArgumentError(
        "--engine is for optstated's own use: no engine configuration"));
  }
  ::close(line.engine_config_fd);
  StartLog(absl::StrCat("engine ", line.engine_job),
           options.config.daemon().log_level(),
           options.config.daemon().log_format());
  return engine::RunEngine(options);
}

int CheckConfig(const CommandLine& line, const v1::DaemonConfig& config) {
  const absl::Status named = CheckNamedThings(config);
  if (!named.ok()) return Fail(named);
  std::cout << (line.config_file.empty() ? "defaults" : line.config_file)
            << ": ok\n";
  if (config.log_level() == "debug" || config.log_level() == "trace") {
    std::cout << config::ToYaml(config);
  }
  return 0;
}

int Run(CommandLine line) {
  if (line.format_versions) {
    std::cout << upgrade::OwnFormatVersions().DebugString();
    return 0;
  }
  if (!line.engine_job.empty()) return RunEngineMode(line);
  if (!line.format_device.empty()) {
    const absl::StatusOr<std::string> formatted =
        supervisor::FormatDeviceOf(line.format_device, line.force);
    if (!formatted.ok()) return Fail(formatted.status());
    std::cout << *formatted << "\n";
    return 0;
  }
  const bool embedded = line.lifeline_fd >= 0;
  // A private daemon logs less: the terminal belongs to the trainer.
  if (embedded && line.config.log_level.empty()) {
    line.config.log_level = "warn";
  }
  // Lines before the configuration is read follow the flags. A check of the
  // configuration answers the one who asks for it, and writes no log.
  if (!line.check_config) {
    StartLog("optstated", line.config.log_level,
             config::LogFormatOf(line.config.log_format));
  }
  const absl::Status usage = config::CheckFlags(line.config);
  if (!usage.ok()) return Fail(usage, config::kExitUsage);
  const auto load = [line] {
    return config::LoadConfig(line.config_file, line.config,
                              config::CurrentConfigEnvironment());
  };
  const absl::StatusOr<v1::DaemonConfig> config = load();
  if (!config.ok()) return Fail(config.status());
  if (line.check_config) return CheckConfig(line, *config);
  StartLog("optstated", config->log_level(), config->log_format());

  // A trainer's private daemon has no use for what is the trainer's.
  const absl::StatusOr<std::vector<accept::ActivatedSocket>> activated =
      accept::TakeActivatedSockets();
  if (!activated.ok()) return Fail(activated.status());
  DaemonOptions options;
  options.config = *config;
  if (embedded) {
    ::fcntl(line.lifeline_fd, F_SETFD, FD_CLOEXEC);
    options.lifeline_fd = line.lifeline_fd;
  }
  options.reload = load;
  options.arguments = line.arguments;
  if (!embedded) options.activated = *activated;
  if (line.handover_fd >= 0) {
    absl::StatusOr<v1::SupervisorHandover> handover =
        upgrade::ReadHandover(line.handover_fd);
    if (!handover.ok()) return Fail(handover.status());
    options.handover = *std::move(handover);
  }
  const absl::Status status = RunDaemon(std::move(options));
  return status.ok() ? 0 : Fail(status);
}

}  // namespace
}  // namespace optstate::server

int main(int argc, char** argv) {
  try {
    optstate::config::CommandLine line;
    const std::optional<int> exit_status =
        optstate::config::ParseCommandLine(argc, argv, &line);
    return exit_status.has_value() ? *exit_status
                                   : optstate::server::Run(std::move(line));
  } catch (const std::exception& error) {
    // Only libraries throw here: out of memory, or a flag that CLI11 would not
    // define.
    return optstate::server::Fail(absl::InternalError(error.what()));
  }
}
