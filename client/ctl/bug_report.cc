#include "client/ctl/bug_report.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/ctl/metrics_page.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "proto/types/version.h"

namespace optstate::ctl {
namespace {

// Returns the first processor's block of /proc/cpuinfo: they differ in little.
absl::StatusOr<std::string> FirstProcessor() {
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::string all,
      ReadSmallFile("/proc/cpuinfo", BugReport::kFileBytesMax));
  const size_t end = all.find("\n\n");
  return absl::StrCat(
      end == std::string::npos ? all : all.substr(0, end),
      "\n\nprocessors online: ", ::sysconf(_SC_NPROCESSORS_ONLN), "\n");
}

std::string ProcessFolder(pid_t pid) {
  return absl::StrCat("/proc/", pid, "/");
}

// Reads the configuration file that the daemon was started with, also where it
// was named relative to the daemon's working directory.
absl::StatusOr<std::string> ReadConfig(pid_t pid, const std::string& path) {
  if (path.empty()) {
    return absl::NotFoundError("the daemon was started without --config");
  }
  if (path.front() == '/') return ReadSmallFile(path, BugReport::kFileBytesMax);
  std::error_code error;
  const auto folder =
      std::filesystem::read_symlink(ProcessFolder(pid) + "cwd", error);
  if (error) {
    return absl::PermissionDeniedError(absl::StrCat(
        path,
        " is relative to the daemon's working directory, which this "
        "user may not see"));
  }
  return ReadSmallFile((folder / path).string(), BugReport::kFileBytesMax);
}

}  // namespace

void BugReport::Add(const std::string& name,
                    const absl::StatusOr<std::string>& content) {
  if (!content.ok()) {
    absl::StrAppend(&missing_, "  ", name, ": ", content.status().message(),
                    "\n");
    return;
  }
  const bool is_cut = content->size() > kFileBytesMax;
  absl::StrAppend(&contents_, "  ", name, is_cut ? " (cut)" : "", "\n");
  const absl::string_view kept =
      absl::string_view(*content).substr(0, kFileBytesMax);
  bytes_ += kept.size();
  written_.Update(archive_->Add(kFolder + name, kept));
}

void BugReport::AddMachineFile(const std::string& folder,
                               const std::string& path) {
  Add(folder + path.substr(path.rfind('/') + 1),
      ReadSmallFile(path, kFileBytesMax));
}

absl::StatusOr<std::string> BugReport::Finish() {
  std::string list = absl::StrCat(
      "Inside:\n", contents_, "  contents.txt\n",
      missing_.empty() ? "Nothing is missing.\n" : "Could not be had:\n",
      missing_, "There are no tensors, no gradients, no parameters and no ",
      "environment variables in it.\n");
  Add("contents.txt", list);
  OPTSTATE_RETURN_IF_ERROR(written_);
  OPTSTATE_RETURN_IF_ERROR(archive_->Finish());
  return list;
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t bytes_max) {
  // A pipe or a device that somebody has put there must not block.
  const UniqueFd fd(
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  std::string content;
  std::array<char, 65536> buffer;
  while (content.size() < bytes_max) {
    const ssize_t size = ::read(fd.get(), buffer.data(), buffer.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return OsError(errno, absl::StrCat("read ", path));
    if (size == 0) break;
    content.append(buffer.data(), static_cast<size_t>(size));
  }
  if (content.size() > bytes_max) content.resize(bytes_max);
  return content;
}

void AddMachine(BugReport* report) {
  report->Add("optctl_version.txt", absl::StrCat("optctl ", kVersion, "\n"));
  for (const char* path :
       {"/proc/version", "/proc/meminfo", "/proc/uptime", "/proc/loadavg",
        "/proc/swaps", "/proc/sys/vm/overcommit_memory",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "/etc/os-release"}) {
    report->AddMachineFile("machine/", path);
  }
  report->Add("machine/cpuinfo_first", FirstProcessor());
}

void AddDaemonProcess(pid_t pid, BugReport* report) {
  for (const char* name : {"status", "limits", "cgroup", "mountinfo"}) {
    report->AddMachineFile("daemon/", ProcessFolder(pid) + name);
  }
  const absl::StatusOr<std::string> command_line =
      ReadSmallFile(ProcessFolder(pid) + "cmdline", BugReport::kFileBytesMax);
  if (!command_line.ok()) return report->Add("daemon/cmdline", command_line);
  report->Add(
      "daemon/cmdline",
      absl::StrReplaceAll(*command_line, {{absl::string_view("\0", 1), "\n"}}));
  report->Add("daemon/config.yaml",
              ReadConfig(pid, ConfigFileIn(*command_line)));
}

std::string MetricsAddressOf(pid_t daemon) {
  const absl::StatusOr<std::string> command_line = ReadSmallFile(
      ProcessFolder(daemon) + "cmdline", BugReport::kFileBytesMax);
  if (!command_line.ok()) return "";
  const absl::StatusOr<std::string> config =
      ReadConfig(daemon, ConfigFileIn(*command_line));
  return MetricsAddressIn(*command_line, config.ok() ? *config : "");
}

void AddEngineProcess(pid_t pid, BugReport* report) {
  for (const char* name : {"status", "limits", "cgroup"}) {
    report->AddMachineFile(absl::StrCat("engine-", pid, "/"),
                           ProcessFolder(pid) + name);
  }
}

std::string ConfigFileIn(const std::string& command_line) {
  const std::vector<std::string> words = absl::StrSplit(command_line, '\0');
  for (size_t i = 1; i < words.size(); ++i) {
    absl::string_view word = words[i];
    if (word == "--config" && i + 1 < words.size()) return words[i + 1];
    if (absl::ConsumePrefix(&word, "--config=")) return std::string(word);
  }
  return "";
}

}  // namespace optstate::ctl
