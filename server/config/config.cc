#include "server/config/config.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/config/access_setting.h"
#include "server/config/device_setting.h"
#include "server/config/job_weight.h"
#include "server/config/listen_address.h"
#include "server/config/nvme_directory.h"
#include "server/config/quota_setting.h"
#include "server/config/yaml_message.h"
#include "server/os/small_file.h"

namespace optstate::config {
namespace {

// Sub-groups are whole tiles.
constexpr uint32_t kTileElements = 4096;
constexpr size_t kConfigBytesMax = 1 << 20;
// As storage/record_split.h has it.
constexpr uint32_t kDirectoryWeightMax = 1'000'000;

struct Fault {
  std::string field;
  std::string text;
};

bool IsLogLevel(absl::string_view level) {
  static constexpr absl::string_view kLevels[] = {"trace", "debug", "info",
                                                  "warn", "error"};
  return absl::c_linear_search(kLevels, level);
}

void CheckPaths(const v1::DaemonConfig& config, std::vector<Fault>* faults) {
  if (!absl::StartsWith(config.state_dir(), "/")) {
    faults->push_back({"state_dir", "must be an absolute path"});
  }
  const absl::Status socket = CheckUnixSocketPath(config.socket());
  if (!socket.ok())
    faults->push_back({"socket", std::string(socket.message())});
  if (config.socket_mode() > 0777) {
    faults->push_back({"socket_mode", "must be at most 0777"});
  }
  if (!config.sleep_directory().empty() &&
      !absl::StartsWith(config.sleep_directory(), "/")) {
    faults->push_back({"sleep_directory", "must be an absolute path"});
  }
  std::set<std::string> addresses = {"unix:" + config.socket()};
  for (const std::string& address : config.listen()) {
    const auto parsed = ParseListenAddress(address);
    if (!parsed.ok()) {
      faults->push_back({"listen", std::string(parsed.status().message())});
    } else if (!addresses.insert(address).second) {
      faults->push_back({"listen", address + " is listened on already"});
    }
  }
  const std::string& metrics = config.metrics().address();
  if (metrics.empty()) return;
  const auto parsed = ParseListenAddress(metrics);
  const absl::Status status =
      parsed.ok() ? CheckHttpSocketPath(parsed->unix_path) : parsed.status();
  if (!status.ok()) {
    faults->push_back({"metrics.address", std::string(status.message())});
  } else if (addresses.contains(metrics)) {
    faults->push_back({"metrics.address",
                       metrics + " is that of sessions and of gRPC; metrics "
                                 "need an address of their own"});
  }
}

// Checks lists that have an entry for each directory, or none.
void CheckPerDirectory(const v1::NvmeSettings& nvme,
                       std::vector<Fault>* faults) {
  const auto check_count = [&](const char* field, int count) {
    if (count == 0 || count == nvme.directories_size()) return;
    faults->push_back(
        {field,
         absl::StrCat("has ", count, " entries for ", nvme.directories_size(),
                      " directories: give each directory one, or none")});
  };
  check_count("nvme.directory_weights", nvme.directory_weights_size());
  check_count("nvme.directory_bytes_max", nvme.directory_bytes_max_size());
  for (const uint32_t weight : nvme.directory_weights()) {
    if (weight >= 1 && weight <= kDirectoryWeightMax) continue;
    faults->push_back(
        {"nvme.directory_weights",
         absl::StrCat("must be from 1 to ", kDirectoryWeightMax)});
    return;
  }
}

// Checks that each entry is of one directory, and each device of one entry.
void CheckDirectorySettings(const v1::NvmeSettings& nvme,
                            std::vector<Fault>* faults) {
  constexpr char kField[] = "nvme.directory_settings";
  std::set<std::string> paths;
  std::set<std::string> devices;
  for (const v1::NvmeDirectory& settings : nvme.directory_settings()) {
    const std::string& device = settings.device();
    if (!absl::c_linear_search(nvme.directories(), settings.path())) {
      faults->push_back({kField, absl::StrCat("\"", settings.path(),
                                              "\" is none of "
                                              "nvme.directories")});
    }
    if (!paths.insert(settings.path()).second) {
      faults->push_back({kField, settings.path() + " is named twice"});
    }
    if (device.empty()) continue;
    if (!absl::StartsWith(device, "/")) {
      faults->push_back({kField, absl::StrCat("device ", device,
                                              " must be an absolute path")});
    }
    if (!devices.insert(device).second) {
      faults->push_back(
          {kField, absl::StrCat("device ", device, " is named twice")});
    }
  }
}

void CheckNvme(const v1::NvmeSettings& nvme, std::vector<Fault>* faults) {
  std::set<std::string> directories;
  for (const std::string& directory : nvme.directories()) {
    if (!absl::StartsWith(directory, "/")) {
      faults->push_back({"nvme.directories",
                         absl::StrCat(directory, " must be an absolute path")});
      continue;
    }
    // One below another would take the other's files for jobs of its own.
    const std::string path =
        std::filesystem::path(directory + "/").lexically_normal();
    for (const std::string& other : directories) {
      if (path == other) {
        faults->push_back({"nvme.directories", directory + " is named twice"});
      } else if (absl::StartsWith(path, other) ||
                 absl::StartsWith(other, path)) {
        faults->push_back(
            {"nvme.directories", absl::StrCat(directory, " and ", other,
                                              " lie one inside the other")});
      }
    }
    directories.insert(path);
  }
  CheckPerDirectory(nvme, faults);
  CheckDirectorySettings(nvme, faults);
  if (nvme.job_host_budget_bytes() == 0) {
    faults->push_back({"nvme.job_host_budget_bytes", "must be positive"});
  }
  if (nvme.scrub_bytes_per_s() == 0) {
    faults->push_back({"nvme.scrub_bytes_per_s",
                       "must be positive; scrub_interval_s: 0 turns scrubs "
                       "off"});
  }
}

void CheckEngine(const v1::EngineSettings& engine, std::vector<Fault>* faults) {
  if (engine.subgroup_elements() == 0 ||
      engine.subgroup_elements() % kTileElements != 0) {
    faults->push_back(
        {"engine.subgroup_elements",
         absl::StrCat("must be a positive multiple of ", kTileElements,
                      ", the elements of a tile")});
  }
  if (engine.workers() > 1024) {
    faults->push_back({"engine.workers", "must be at most 1024"});
  }
  if (engine.doorbell_spin_us() > 1000000) {
    faults->push_back({"engine.doorbell_spin_us", "must be at most 1000000"});
  }
  if (engine.restart_window_s() == 0) {
    faults->push_back({"engine.restart_window_s", "must be at least 1"});
  }
  if (!IsWeight(engine.weight())) {
    faults->push_back({"engine.weight", "must be from 1 to 10000"});
  }
  for (const std::string& text : engine.job_weights()) {
    const absl::Status parsed = ParseJobWeight(text).status();
    if (parsed.ok()) continue;
    faults->push_back({"engine.job_weights", std::string(parsed.message())});
  }
}

void CheckLimits(const v1::Limits& limits, std::vector<Fault>* faults) {
  const std::pair<const char*, uint32_t> positive[] = {
      {"limits.jobs_max", limits.jobs_max()},
      {"limits.sessions_max", limits.sessions_max()},
      {"limits.handshake_timeout_ms", limits.handshake_timeout_ms()},
      {"limits.rank_return_timeout_ms", limits.rank_return_timeout_ms()},
      {"limits.user_grpc_connections_max", limits.user_grpc_connections_max()}};
  for (const auto& [field, value] : positive) {
    if (value == 0) faults->push_back({field, "must be at least 1"});
  }
  if (limits.operator_reserve_percent() > 99) {
    faults->push_back(
        {"limits.operator_reserve_percent", "must be at most 99"});
  }
}

std::vector<Fault> Check(const v1::DaemonConfig& config) {
  std::vector<Fault> faults;
  CheckPaths(config, &faults);
  if (!IsLogLevel(config.log_level())) {
    faults.push_back(
        {"log_level", absl::StrCat("\"", config.log_level(),
                                   "\" is none of trace, debug, info, warn, "
                                   "error")});
  }
  if (config.log_format() == v1::LOG_FORMAT_UNSPECIFIED) {
    faults.push_back({"log_format", "must be text, json or logfmt"});
  }
  if (config.lock_memory() == v1::LOCK_MEMORY_UNSPECIFIED) {
    faults.push_back({"lock_memory", "must be auto, always or never"});
  }
  const absl::Status devices = ParseDeviceSetting(config.devices()).status();
  if (!devices.ok()) {
    faults.push_back({"devices", std::string(devices.message())});
  }
  CheckEngine(config.engine(), &faults);
  CheckNvme(config.nvme(), &faults);
  CheckLimits(config.limits(), &faults);
  return faults;
}

// Checks what flags and file say together, for a daemon of this user.
std::vector<Fault> CheckWhole(const v1::DaemonConfig& config, uid_t uid) {
  std::vector<Fault> faults = Check(config);
  for (auto& [field, text] : CheckQuotas(config, uid)) {
    faults.push_back({std::move(field), std::move(text)});
  }
  for (auto& [field, text] : CheckAccess(config)) {
    faults.push_back({std::move(field), std::move(text)});
  }
  return faults;
}

// Returns UNSPECIFIED when the word is none of the setting's.
v1::LockMemory LockMemoryOf(absl::string_view word) {
  v1::LockMemory value = v1::LOCK_MEMORY_UNSPECIFIED;
  v1::LockMemory_Parse(
      absl::StrCat("LOCK_MEMORY_", absl::AsciiStrToUpper(word)), &value);
  return value;
}

// Names the flag that a faulty value came from; "": no flag.
std::string FlagOf(const std::string& field, const ConfigFlags& flags) {
  if (field == "state_dir" && !flags.state_dir.empty()) return "--state-dir";
  if (field == "socket" && !flags.socket.empty()) return "--socket";
  if (field == "listen" && !flags.listen.empty()) return "--listen";
  if (field == "insecure_tcp" && flags.insecure_tcp) return "--insecure";
  if (field == "log_level" && !flags.log_level.empty()) return "--log-level";
  if (field == "log_format" && !flags.log_format.empty()) {
    return "--log-format";
  }
  if (field == "lock_memory" && !flags.lock_memory.empty()) {
    return "--lock-memory";
  }
  if (field == "devices" && !flags.devices.empty()) return "--devices";
  if (field == "sleep_directory" && !flags.sleep_directory.empty()) {
    return "--sleep-dir";
  }
  if (field == "metrics.address" && !flags.metrics.empty()) return "--metrics";
  if ((field == "nvme.directories" || field == "nvme.directory_settings") &&
      !flags.nvme_directories.empty()) {
    return "--nvme-dir";
  }
  return "";
}

absl::Status FaultStatus(const Fault& fault, const ConfigFlags& flags,
                         absl::string_view file, const FieldLines& lines) {
  const std::string flag = FlagOf(fault.field, flags);
  if (!flag.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": ", fault.text));
  }
  const auto line = lines.find(fault.field);
  if (line == lines.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(fault.field, ": ", fault.text));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      file, ":", line->second, ": ", fault.field, ": ", fault.text));
}

void ApplyFlags(const ConfigFlags& flags, v1::DaemonConfig* config) {
  if (!flags.state_dir.empty()) config->set_state_dir(flags.state_dir);
  if (!flags.socket.empty()) config->set_socket(flags.socket);
  if (!flags.log_level.empty()) config->set_log_level(flags.log_level);
  if (!flags.log_format.empty()) {
    config->set_log_format(LogFormatOf(flags.log_format));
  }
  if (!flags.listen.empty()) {
    *config->mutable_listen() = {flags.listen.begin(), flags.listen.end()};
  }
  if (!flags.devices.empty()) config->set_devices(flags.devices);
  if (!flags.sleep_directory.empty()) {
    config->set_sleep_directory(flags.sleep_directory);
  }
  if (!flags.metrics.empty()) {
    config->mutable_metrics()->set_address(flags.metrics);
  }
  if (flags.insecure_tcp) config->set_insecure_tcp(true);
  if (!flags.lock_memory.empty()) {
    config->set_lock_memory(LockMemoryOf(flags.lock_memory));
  }
  if (!flags.nvme_directories.empty()) {
    v1::NvmeSettings& nvme = *config->mutable_nvme();
    nvme.clear_directories();
    nvme.clear_directory_settings();
    for (const std::string& text : flags.nvme_directories) {
      const auto directory = ParseNvmeDirectory(text);
      // The command line was refused already where this is no directory.
      nvme.add_directories(directory.ok() ? directory->path() : text);
      if (directory.ok() && !directory->device().empty()) {
        *nvme.add_directory_settings() = *directory;
      }
    }
  }
}

std::string DefaultSocket(const ConfigEnvironment& environment) {
  if (environment.uid == 0) return "/run/optstate/optstated.sock";
  if (!environment.xdg_runtime_dir.empty()) {
    return environment.xdg_runtime_dir + "/optstate/optstated.sock";
  }
  return absl::StrCat("/tmp/optstate-", environment.uid, "/optstated.sock");
}

}  // namespace

ConfigEnvironment CurrentConfigEnvironment() {
  const char* runtime_dir = std::getenv("XDG_RUNTIME_DIR");
  return {::geteuid(), runtime_dir == nullptr ? "" : runtime_dir};
}

v1::DaemonConfig DefaultConfig(const ConfigEnvironment& environment) {
  v1::DaemonConfig config;
  config.set_state_dir(environment.uid == 0 ? "/dev/shm/optstate"
                                            : absl::StrCat("/dev/shm/optstate-",
                                                           environment.uid));
  config.set_socket(DefaultSocket(environment));
  config.set_socket_mode(0666);
  config.set_log_level("info");
  config.set_log_format(v1::LOG_FORMAT_TEXT);
  config.set_huge_pages(v1::HUGE_PAGES_AUTO);
  config.set_lock_memory(v1::LOCK_MEMORY_AUTO);
  config.set_devices("cuda");
  config.mutable_metrics()->set_address("");
  config.set_drain_timeout_s(30);
  config.mutable_nvme()->set_job_host_budget_bytes(uint64_t{1} << 30);
  config.mutable_nvme()->set_io_engine(v1::IO_ENGINE_KIND_AUTO);
  config.mutable_nvme()->set_scrub_interval_s(7 * 24 * 60 * 60);
  config.mutable_nvme()->set_scrub_bytes_per_s(uint64_t{64} << 20);

  v1::EngineSettings& engine = *config.mutable_engine();
  engine.set_workers(0);
  engine.set_subgroup_elements(262144);
  engine.set_doorbell_spin_us(50);
  engine.set_restarts_max(5);
  engine.set_restart_window_s(60);
  engine.set_on_rank_loss(v1::RANK_LOSS_WAIT);
  engine.set_pinning(v1::PINNING_AUTO);
  engine.set_weight(100);

  v1::Limits& limits = *config.mutable_limits();
  limits.set_jobs_max(256);
  limits.set_sessions_max(1024);
  limits.set_state_bytes_max(0);
  limits.set_job_state_bytes_max(0);
  limits.set_handshake_timeout_ms(5000);
  limits.set_rank_return_timeout_ms(86'400'000);
  limits.set_memory_reserve_bytes(uint64_t{256} << 20);
  limits.set_user_jobs_max(0);
  limits.set_user_sessions_max(0);
  limits.set_user_state_bytes_max(0);
  limits.set_user_grpc_connections_max(64);
  limits.set_operator_reserve_percent(12);
  return config;
}

v1::LogFormat LogFormatOf(absl::string_view word) {
  if (word == "text") return v1::LOG_FORMAT_TEXT;
  if (word == "json") return v1::LOG_FORMAT_JSON;
  if (word == "logfmt") return v1::LOG_FORMAT_LOGFMT;
  return v1::LOG_FORMAT_UNSPECIFIED;
}

absl::Status CheckFlags(const ConfigFlags& flags) {
  v1::DaemonConfig config = DefaultConfig({});
  // The file may name another socket, besides which --listen may name the
  // default one.
  config.set_socket("/-");
  ApplyFlags(flags, &config);
  const std::vector<Fault> faults = Check(config);
  if (!faults.empty()) return FaultStatus(faults[0], flags, "", {});
  return absl::OkStatus();
}

absl::StatusOr<v1::DaemonConfig> ParseConfig(
    absl::string_view text, absl::string_view file, const ConfigFlags& flags,
    const ConfigEnvironment& environment) {
  v1::DaemonConfig config = DefaultConfig(environment);
  FieldLines lines;
  OPTSTATE_RETURN_IF_ERROR(MergeYaml(text, file, &config, &lines));
  ApplyFlags(flags, &config);
  const std::vector<Fault> faults = CheckWhole(config, environment.uid);
  if (!faults.empty()) return FaultStatus(faults[0], flags, file, lines);
  return config;
}

absl::StatusOr<v1::DaemonConfig> LoadConfig(
    const std::string& file, const ConfigFlags& flags,
    const ConfigEnvironment& environment) {
  if (file.empty()) return ParseConfig("", "", flags, environment);
  OPTSTATE_ASSIGN_OR_RETURN(const std::string text,
                            os::ReadSmallFile(file, kConfigBytesMax));
  return ParseConfig(text, file, flags, environment);
}

}  // namespace optstate::config
