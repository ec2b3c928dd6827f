#include "server/supervisor/disk_directories.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/os/private_directory.h"
#include "server/os/small_file.h"

namespace optstate::supervisor {
namespace {

constexpr char kLockName[] = "/lock";
constexpr char kJobsName[] = "/jobs";

std::string JobPath(const std::string& directory, const std::string& name) {
  return absl::StrCat(directory, kJobsName, "/", name);
}

}  // namespace

absl::StatusOr<DiskDirectories> DiskDirectories::Open(
    std::vector<std::string> paths) {
  DiskDirectories disks;
  for (const std::string& path : paths) {
    OPTSTATE_RETURN_IF_ERROR(
        Annotate(os::EnsurePrivateDirectory(path, 0700), "nvme.directories"));
    OPTSTATE_RETURN_IF_ERROR(
        os::EnsurePrivateDirectory(path + kJobsName, 0700));
    OPTSTATE_ASSIGN_OR_RETURN(
        os::FileLock lock,
        os::FileLock::Take(path + kLockName,
                           absl::StrCat("disk directory ", path)));
    disks.locks_.push_back(std::move(lock));
  }
  disks.paths_ = std::move(paths);
  return disks;
}

std::vector<std::string> DiskDirectories::Jobs() const {
  std::vector<std::string> names;
  for (const std::string& path : paths_) {
    std::error_code error;
    for (std::filesystem::directory_iterator entry(path + kJobsName, error),
         end;
         !error && entry != end; entry.increment(error)) {
      std::string name = entry->path().filename().string();
      if (accept::CheckJobName(name).ok()) names.push_back(std::move(name));
    }
    if (error) spdlog::error("{}{}: {}", path, kJobsName, error.message());
  }
  return names;
}

bool DiskDirectories::HasCommit(const std::string& name) const {
  return ::access((JobPath(paths_[0], name) + "/commits").c_str(), F_OK) == 0;
}

bool DiskDirectories::IsDurable(const std::string& name) const {
  return std::any_of(
      paths_.begin(), paths_.end(), [&name](const std::string& path) {
        return ::access((JobPath(path, name) + "/durable").c_str(), F_OK) == 0;
      });
}

std::vector<std::string> DiskDirectories::JobsWithoutCommit() const {
  std::vector<std::string> names = Jobs();
  names.erase(std::remove_if(names.begin(), names.end(),
                             [this](const std::string& name) {
                               return HasCommit(name) || IsDurable(name);
                             }),
              names.end());
  return names;
}

std::map<std::string, uid_t, std::less<>> DiskDirectories::DurableJobs() const {
  std::map<std::string, uid_t, std::less<>> jobs;
  if (paths_.empty()) return jobs;
  for (const std::string& name : Jobs()) {
    const std::string path = JobPath(paths_[0], name);
    if (!HasCommit(name)) continue;
    const auto text = os::ReadSmallFile(path + "/owner", 32);
    uid_t owner = 0;
    if (!text.ok() ||
        !absl::SimpleAtoi(absl::StripAsciiWhitespace(*text), &owner)) {
      spdlog::error("{} has a job on disk, but no owner: left alone: {}", path,
                    text.status().ToString());
      continue;
    }
    jobs[name] = owner;
  }
  return jobs;
}

void DiskDirectories::RemoveJob(const std::string& name) const {
  for (const std::string& path : paths_) {
    const absl::Status removed = os::RemoveTree(JobPath(path, name));
    if (!removed.ok()) spdlog::error("{}", removed.ToString());
  }
}

}  // namespace optstate::supervisor
