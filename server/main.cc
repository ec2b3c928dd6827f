// optstated: the optimizer-state daemon of a node. The same binary is the
// supervisor, each job's engine (--engine) and a trainer's private daemon
// (--embedded).

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "optstate/v1/config.pb.h"
#include "proto/types/version.h"
#include "server/build_check.h"
#include "server/daemon.h"
#include "server/engine/engine.h"
#include "server/handover.h"
#include "server/observe/logging.h"
#include "server/observe/peer_log.h"
#include "server/supervisor/config.h"
#include "server/supervisor/engine_process.h"
#include "server/supervisor/yaml_message.h"

namespace optstate {
namespace {

using supervisor::ConfigFlags;
using supervisor::EngineCommandLine;

constexpr int kExitUsage = 2;

struct Flags {
  std::string config_file;
  bool check_config = false;
  ConfigFlags config;
  int lifeline_fd = -1;
  std::string engine_job;
  int engine_config_fd = -1;
  int engine_socket_fd = -1;
  bool format_versions = false;
  int handover_fd = -1;
  std::vector<std::string> arguments;  // all, but --handover-fd
};

constexpr char kDescription[] =
    "optstated keeps the optimizer state of the training jobs of one node and "
    "applies their updates.\n"
    "Without --config, defaults are used; flags override the file. "
    "SIGTERM finishes open steps and ends. SIGHUP reads the configuration "
    "again "
    "and, when another build was installed, takes that into use, as `optctl "
    "upgrade` does: jobs go on.";

// Refuses an empty value, which would mean the default.
std::string CheckGiven(const std::string& value) {
  return value.empty() ? "is empty: give a value, or leave the flag out" : "";
}

void AddFlags(CLI::App* app, Flags* flags) {
  app->add_option("--config", flags->config_file, "YAML configuration")
      ->type_name("FILE")
      ->check(CheckGiven);
  app->add_flag("--check-config", flags->check_config,
                "Check the configuration and exit: 0 when it is good, else 1");
  app->add_option("--state-dir", flags->config.state_dir,
                  "Where the jobs' state lives, a tmpfs as a rule")
      ->type_name("DIR")
      ->check(CheckGiven);
  app->add_option("--socket", flags->config.socket,
                  "Unix socket of sessions and of gRPC")
      ->type_name("PATH")
      ->check(CheckGiven);
  app->add_option("--listen", flags->config.listen,
                  "Further address, HOST:PORT or unix:PATH; repeatable. "
                  "Whoever reaches a TCP address acts as the daemon's user")
      ->type_name("ADDRESS")
      ->allow_extra_args(false);
  app->add_option("--nvme-dir", flags->config.nvme_directories,
                  "Directory on a disk for jobs whose state is larger than "
                  "memory, or durable; repeatable")
      ->type_name("DIR")
      ->allow_extra_args(false);
  app->add_option("--log-level", flags->config.log_level,
                  "trace, debug, info, warn or error")
      ->type_name("LEVEL")
      ->check(CheckGiven);
  app->set_version_flag("--version", absl::StrCat("optstated ", kVersion));

  // An empty group hides an option: these are for the daemon's own processes.
  app->add_option("--embedded", flags->lifeline_fd)->group("");
  app->add_option(EngineCommandLine::kJobFlag, flags->engine_job)->group("");
  app->add_option(EngineCommandLine::kConfigFdFlag, flags->engine_config_fd)
      ->group("");
  app->add_option(EngineCommandLine::kSocketFdFlag, flags->engine_socket_fd)
      ->group("");
  app->add_flag(kFormatVersionsFlag, flags->format_versions)->group("");
  app->add_option(kHandoverFdFlag, flags->handover_fd)->group("");
}

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

// Drops the handover flag: the last upgrade's does not hold for the next.
std::vector<std::string> ArgumentsWithoutHandover(int argc, char** argv) {
  std::vector<std::string> arguments;
  for (int i = 0; i < argc; ++i) {
    if (std::string(argv[i]) == kHandoverFdFlag) {
      ++i;
    } else {
      arguments.emplace_back(argv[i]);
    }
  }
  return arguments;
}

int Fail(const absl::Status& status, int code = 1) {
  // The text is plain, so that it is readable before and without a log.
  std::cerr << "optstated: " << status.message() << "\n";
  return code;
}

int RunEngineMode(const Flags& flags) {
  EngineOptions options;
  options.socket_fd = flags.engine_socket_fd;
  if (!options.config.ParseFromFileDescriptor(flags.engine_config_fd)) {
    return Fail(absl::InvalidArgumentError(
        "--engine is for optstated's own use: no engine configuration"));
  }
  ::close(flags.engine_config_fd);
  observe::SetUpLogging(absl::StrCat("engine ", flags.engine_job),
                        options.config.daemon().log_level());
  observe::RouteGrpcLog();
  return RunEngine(options);
}

int CheckConfig(const Flags& flags, const v1::DaemonConfig& config) {
  std::cout << (flags.config_file.empty() ? "defaults" : flags.config_file)
            << ": ok\n";
  if (config.log_level() == "debug" || config.log_level() == "trace") {
    std::cout << supervisor::ToYaml(config);
  }
  return 0;
}

int Run(Flags flags) {
  if (flags.format_versions) {
    std::cout << OwnFormatVersions().DebugString();
    return 0;
  }
  if (!flags.engine_job.empty()) return RunEngineMode(flags);
  const bool embedded = flags.lifeline_fd >= 0;
  // A private daemon logs less: the terminal belongs to the trainer.
  if (embedded && flags.config.log_level.empty()) {
    flags.config.log_level = "warn";
  }
  const absl::Status usage = supervisor::CheckFlags(flags.config);
  if (!usage.ok()) return Fail(usage, kExitUsage);
  const auto load = [flags] {
    return supervisor::LoadConfig(flags.config_file, flags.config,
                                  supervisor::CurrentConfigEnvironment());
  };
  const absl::StatusOr<v1::DaemonConfig> config = load();
  if (!config.ok()) return Fail(config.status());
  if (flags.check_config) return CheckConfig(flags, *config);

  observe::SetUpLogging("optstated", config->log_level());
  observe::RouteGrpcLog();
  DaemonOptions options;
  options.config = *config;
  if (embedded) {
    ::fcntl(flags.lifeline_fd, F_SETFD, FD_CLOEXEC);
    options.lifeline_fd = flags.lifeline_fd;
  }
  options.reload = load;
  options.arguments = flags.arguments;
  if (flags.handover_fd >= 0) {
    absl::StatusOr<v1::SupervisorHandover> handover =
        ReadHandover(flags.handover_fd);
    if (!handover.ok()) return Fail(handover.status());
    options.handover = *std::move(handover);
  }
  const absl::Status status = RunDaemon(std::move(options));
  return status.ok() ? 0 : Fail(status);
}

}  // namespace
}  // namespace optstate

int main(int argc, char** argv) {
  try {
    CLI::App app(optstate::kDescription, "optstated");
    optstate::Flags flags;
    optstate::AddFlags(&app, &flags);
    flags.arguments = optstate::ArgumentsWithoutHandover(argc, argv);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      // CLI11 has a code for every kind of mistake.
      return app.exit(error) == 0 ? 0 : optstate::kExitUsage;
    }
    return optstate::Run(std::move(flags));
  } catch (const std::exception& error) {
    // Only libraries throw here: out of memory, or a flag that CLI11 would not
    // define.
    std::fprintf(stderr, "optstated: %s\n", error.what());
    return 1;
  }
}
