#include "server/config/command_line.h"

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "proto/types/version.h"
#include "server/config/nvme_directory.h"
#include "server/config/own_flags.h"

namespace optstate::config {
namespace {

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

std::string CheckNvmeDirectory(const std::string& value) {
  return std::string(ParseNvmeDirectory(value).status().message());
}

void AddFlags(CLI::App* app, CommandLine* line) {
  app->add_option("--config", line->config_file, "YAML configuration")
      ->type_name("FILE")
      ->check(CheckGiven);
  app->add_flag("--check-config", line->check_config,
                "Check the configuration and exit: 0 when it is good, else 1");
  CLI::Option* const format =
      app->add_option("--format-device", line->format_device,
                      "Give all of a block device to the records of a "
                      "directory's jobs, and exit; refused where it has other "
                      "content")
          ->type_name("DIR,device=DEVICE")
          ->check(CheckNvmeDirectory);
  app->add_flag("--force", line->force,
                "With --format-device: overwrite other content")
      ->needs(format);
  app->add_option("--state-dir", line->config.state_dir,
                  "Where the jobs' state lives, a tmpfs as a rule")
      ->type_name("DIR")
      ->check(CheckGiven);
  app->add_option("--socket", line->config.socket,
                  "Unix socket of sessions and of gRPC")
      ->type_name("PATH")
      ->check(CheckGiven);
  app->add_option("--listen", line->config.listen,
                  "Further address, HOST:PORT or unix:PATH; repeatable. TCP "
                  "takes a certificate (tls in the file), or --insecure")
      ->type_name("ADDRESS")
      ->allow_extra_args(false);
  app->add_flag("--insecure", line->config.insecure_tcp,
                "TCP without TLS, on loopback addresses alone: every local "
                "user who reaches the port acts as the daemon's user");
  app->add_option("--nvme-dir", line->config.nvme_directories,
                  "Directory on a disk for jobs whose state is larger than "
                  "memory, or durable; with a device, their records lie there, "
                  "and the directory has their small files; repeatable")
      ->type_name("DIR[,device=DEVICE]")
      ->check(CheckNvmeDirectory)
      ->allow_extra_args(false);
  app->add_option("--lock-memory", line->config.lock_memory,
                  "Whether jobs' state is locked in memory, so that it never "
                  "goes to swap: auto, always or never")
      ->type_name("WHEN")
      ->check(CheckGiven);
  app->add_option("--sleep-dir", line->config.sleep_directory,
                  "A directory on a disk for jobs that `optctl sleep` puts to "
                  "sleep; else asleep below the first --nvme-dir");
  app->add_option("--devices", line->config.devices,
                  "The devices that may update a part of a job's elements "
                  "(offload_fraction): cuda, none or, to try it without one, "
                  "emulated:N")
      ->type_name("KIND")
      ->check(CheckGiven);
  app->add_option("--metrics", line->config.metrics,
                  "Address of an HTTP server for Prometheus (/metrics) and for "
                  "people (/), HOST:PORT or unix:PATH; read-only, and open to "
                  "whoever reaches it")
      ->type_name("ADDRESS")
      ->check(CheckGiven);
  app->add_option("--log-level", line->config.log_level,
                  "trace, debug, info, warn or error")
      ->type_name("LEVEL")
      ->check(CheckGiven);
  app->add_option("--log-format", line->config.log_format,
                  "How lines of the log are written: text, json, an object a "
                  "line, or logfmt, pairs of key and value")
      ->type_name("FORMAT")
      ->check(CheckGiven);
  app->set_version_flag("--version", absl::StrCat("optstated ", kVersion));

  // An empty group hides an option: these are for the daemon's own processes.
  app->add_option(kEmbeddedFlag, line->lifeline_fd)->group("");
  app->add_option(kEngineFlag, line->engine_job)->group("");
  app->add_option(kEngineConfigFdFlag, line->engine_config_fd)->group("");
  app->add_option(kEngineSocketFdFlag, line->engine_socket_fd)->group("");
  app->add_flag(kFormatVersionsFlag, line->format_versions)->group("");
  app->add_option(kHandoverFdFlag, line->handover_fd)->group("");
}

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

}  // namespace

std::optional<int> ParseCommandLine(int argc, char** argv, CommandLine* line) {
  CLI::App app(kDescription, "optstated");
  AddFlags(&app, line);
  line->arguments = ArgumentsWithoutHandover(argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 has a code for every kind of mistake.
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  return std::nullopt;
}

}  // namespace optstate::config
