#include "server/session/tiers/node_budget.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/types/status_macros.h"
#include "storage/access_file.h"
#include "storage/allocated_bytes.h"
#include "storage/disk_folder.h"
#include "storage/state_folder.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;

// The jobs' names in an error.
constexpr size_t kNamesMax = 8;

// Calls `bytes_of` with the folder of each job, and keeps those with bytes,
// the largest first.
template <typename BytesOf>
std::vector<BytesOfJob> EachJob(const std::string& jobs,
                                const BytesOf& bytes_of) {
  std::vector<BytesOfJob> all;
  std::error_code error;
  fs::directory_iterator entries(jobs, error);
  for (; !error && entries != fs::directory_iterator();
       entries.increment(error)) {
    const std::string name = entries->path().filename();
    const uint64_t bytes = bytes_of(entries->path().string());
    if (bytes != 0) all.push_back({name, bytes});
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.job < b.job;
  });
  return all;
}

// Returns OK when `needed` fits a limit beside what jobs other than `job` have.
// `folders`: where the folders of jobs are that say which ones are private, and
// must not be named.
absl::Status CheckFits(uint64_t limit, const std::string& what,
                       const std::vector<BytesOfJob>& jobs,
                       const std::string& folders, const std::string& job,
                       uint64_t needed, const std::string& advice,
                       bool beside = false) {
  uint64_t taken = 0;
  std::vector<const BytesOfJob*> others;
  for (const BytesOfJob& one : jobs) {
    if (one.job == job && beside) needed += one.bytes;
    if (one.job == job) continue;
    taken += one.bytes;
    others.push_back(&one);
  }
  const uint64_t left = limit > taken ? limit - taken : 0;
  if (needed <= left) return absl::OkStatus();
  std::vector<std::string> names;
  for (const BytesOfJob* other : others) {
    if (names.size() == kNamesMax) {
      names.push_back(absl::StrCat(others.size() - kNamesMax, " more"));
      break;
    }
    const bool is_hidden =
        storage::MayBePrivate(absl::StrCat(folders, "/", other->job));
    names.push_back(is_hidden
                        ? absl::StrCat("a private job ", other->bytes)
                        : absl::StrCat("\"", other->job, "\" ", other->bytes));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      what, " is ", limit, " bytes: the job needs ", needed, ", ", left,
      " are left",
      names.empty()
          ? ""
          : absl::StrCat(", others have ", absl::StrJoin(names, ", ")),
      "; ", advice));
}

}  // namespace

std::vector<BytesOfJob> FramesOfJobs(const std::string& state_dir) {
  return EachJob(state_dir + "/jobs", [](const std::string& folder) {
    std::error_code error;
    const uint64_t bytes =
        fs::file_size(folder + storage::kStateFolder + "/frames", error);
    return error ? uint64_t{0} : bytes;
  });
}

std::vector<BytesOfJob> DiskBytesOfJobs(const std::string& directory) {
  return EachJob(
      directory + storage::kDiskJobsFolder, [](const std::string& folder) {
        uint64_t bytes = storage::AllocatedBytesBelow(folder);
        for (const uint32_t arrangement : {0, 1}) {
          const auto extent = storage::ReadDiskExtent(folder, arrangement);
          if (extent.ok() && extent->has_value()) {
            bytes += (*extent)->extent.bytes;
          }
        }
        return bytes;
      });
}

std::optional<uint64_t> NodeBudgetLeft(const std::string& state_dir,
                                       const v1::NvmeSettings& nvme,
                                       const std::string& job) {
  if (nvme.host_budget_bytes() == 0) return std::nullopt;
  uint64_t taken = 0;
  for (const BytesOfJob& one : FramesOfJobs(state_dir)) {
    if (one.job != job) taken += one.bytes;
  }
  return nvme.host_budget_bytes() - std::min(taken, nvme.host_budget_bytes());
}

absl::Status CheckNodeBudget(const std::string& state_dir,
                             const v1::NvmeSettings& nvme,
                             const std::string& job, uint64_t frames_bytes) {
  if (nvme.host_budget_bytes() == 0) return absl::OkStatus();
  return CheckFits(
      nvme.host_budget_bytes(),
      "the node's budget for records in memory (nvme.host_budget_bytes)",
      FramesOfJobs(state_dir), state_dir + "/jobs", job, frames_bytes,
      "give a job less (host_budget=, or optctl set job NAME host_budget=), "
      "delete one, or raise the node's budget");
}

absl::Status CheckDirectoryLimits(const v1::NvmeSettings& nvme,
                                  const std::string& job,
                                  absl::Span<const uint64_t> bytes,
                                  bool beside) {
  const int count =
      std::min(nvme.directory_bytes_max_size(), static_cast<int>(bytes.size()));
  for (int i = 0; i < count; ++i) {
    const uint64_t limit = nvme.directory_bytes_max(i);
    if (limit == 0) continue;
    OPTSTATE_RETURN_IF_ERROR(
        CheckFits(limit,
                  absl::StrCat("the limit of ", nvme.directories(i),
                               " (nvme.directory_bytes_max)"),
                  DiskBytesOfJobs(nvme.directories(i)),
                  nvme.directories(0) + storage::kDiskJobsFolder, job, bytes[i],
                  "delete a job, or raise the limit", beside));
  }
  return absl::OkStatus();
}

}  // namespace optstate::session
