#include "server/session/tiers/auto_placement.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/types/status_macros.h"
#include "server/session/durability/commit_period.h"
#include "server/session/durability/job_storage.h"

namespace optstate::session {
namespace {

using storage::kSwapFramesMin;

std::string Mebibytes(uint64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

v1::StorageSettings OnDisk(const PlacementQuestion& question,
                           uint64_t budget_bytes) {
  v1::StorageSettings storage = question.asked;
  storage.set_placement(v1::PLACEMENT_NVME);
  storage.set_host_budget_bytes(budget_bytes);
  return storage;
}

// Returns the largest number of frames that is admitted. `most` are not.
absl::StatusOr<uint64_t> LargestAdmitted(const PlacementQuestion& question,
                                         uint64_t most, Admits admits) {
  const auto admitted = [&](uint64_t frames) {
    return admits(OnDisk(question, frames * question.sizes.frame));
  };
  OPTSTATE_RETURN_IF_ERROR(admitted(kSwapFramesMin));
  uint64_t least = kSwapFramesMin;
  while (most - least > 1) {
    const uint64_t middle = least + (most - least) / 2;
    const absl::Status status = admitted(middle);
    if (status.ok()) {
      least = middle;
    } else if (absl::IsResourceExhausted(status)) {
      most = middle;
    } else {
      return status;
    }
  }
  return least;
}

// Returns the budget of a job that asks for none.
absl::StatusOr<uint64_t> LargestBudget(const PlacementQuestion& question,
                                       Admits admits) {
  const uint64_t frame = question.sizes.frame;
  const uint64_t bytes =
      question.node_budget_left.value_or(question.default_budget_bytes);
  const uint64_t most =
      std::max(std::min(bytes / frame, question.sizes.records), kSwapFramesMin);
  const absl::Status all = admits(OnDisk(question, most * frame));
  if (all.ok()) return most * frame;
  if (!absl::IsResourceExhausted(all) || most == kSwapFramesMin) return all;
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t frames,
                            LargestAdmitted(question, most, admits));
  return frames * frame;
}

// Returns the records that a step reads from disk.
uint64_t RecordsRead(const v1::StorageSettings& storage,
                     const storage::SwapSizes& sizes) {
  if (storage.placement() != v1::PLACEMENT_NVME) return 0;
  const uint64_t frames = FrameBytesOf(storage, sizes) / sizes.frame;
  return sizes.records - std::min(frames, sizes.records);
}

// Returns the records that a step writes, on average: with a durability of each
// step all, of each N steps at least all in each period of commits.
double RecordsWritten(const v1::StorageSettings& storage,
                      const storage::SwapSizes& sizes) {
  const auto swapped = static_cast<double>(RecordsRead(storage, sizes));
  const auto all = static_cast<double>(sizes.records);
  if (storage.durability() == v1::DURABILITY_KIND_STEP) return all;
  if (storage.durability() != v1::DURABILITY_KIND_EVERY) return swapped;
  return std::max(swapped,
                  all / static_cast<double>(CommitPeriodSteps(storage)));
}

}  // namespace

absl::StatusOr<v1::StorageSettings> ChoosePlacement(
    const PlacementQuestion& question, Admits admits) {
  v1::StorageSettings storage = question.asked;
  storage.set_placement(v1::PLACEMENT_HOST);
  storage.clear_host_budget_bytes();
  const absl::Status in_memory = admits(storage);
  if (in_memory.ok()) {
    storage.set_placement_reason("auto: the state fits in memory");
    return storage;
  }
  if (!absl::IsResourceExhausted(in_memory)) return in_memory;
  if (!question.has_disk) {
    return absl::ResourceExhaustedError(absl::StrCat(
        in_memory.message(),
        "; and this daemon has no directory on a disk (--nvme-dir), where the "
        "state could lie"));
  }
  if (question.asked.host_budget_bytes() != 0) {
    storage = OnDisk(question, question.asked.host_budget_bytes());
    OPTSTATE_RETURN_IF_ERROR(admits(storage));
  } else {
    OPTSTATE_ASSIGN_OR_RETURN(const uint64_t budget,
                              LargestBudget(question, admits));
    storage = OnDisk(question, budget);
  }
  const storage::SwapSizes& sizes = question.sizes;
  const uint64_t frames = FrameBytesOf(storage, sizes) / sizes.frame;
  storage.set_placement_reason(absl::StrCat(
      "auto: the state does not fit in memory; ",
      std::min(frames, sizes.records), " of ", sizes.records,
      " records of up to ", Mebibytes(sizes.frame), " are in memory at once, ",
      question.asked.host_budget_bytes() != 0 ? "as asked for"
      : question.node_budget_left.has_value() ? "what the node has left"
                                              : "by the default of a job"));
  return storage;
}

StepEstimate EstimateStep(const v1::StorageSettings& storage,
                          const storage::SwapSizes& sizes,
                          const DiskRates& rates, double memory_bytes_per_s) {
  StepEstimate estimate;
  const auto frame = static_cast<double>(sizes.frame);
  if (memory_bytes_per_s > 0) {
    estimate.memory_s =
        2 * static_cast<double>(sizes.records) * frame / memory_bytes_per_s;
  }
  const double read = static_cast<double>(RecordsRead(storage, sizes)) * frame;
  const double written = RecordsWritten(storage, sizes) * frame;
  estimate.disk_bytes = static_cast<uint64_t>(read + written);
  double all_bytes = 0;
  for (const uint64_t bytes : sizes.directories) {
    all_bytes += static_cast<double>(bytes);
  }
  if (estimate.disk_bytes == 0 || all_bytes == 0 ||
      rates.directories.size() != sizes.directories.size()) {
    return estimate;
  }
  for (size_t i = 0; i < sizes.directories.size(); ++i) {
    const v1::DirectoryRates& of = rates.directories[i];
    if (of.measured_at_ns() == 0) {
      estimate.disk_s = 0;
      return estimate;
    }
    const double part = static_cast<double>(sizes.directories[i]) / all_bytes;
    // Records that are read are also written; the rest is only written.
    const double both_s = 2 * read / of.mixed_bytes_per_s();
    const double rest_s =
        std::max(written - read, 0.0) / of.write_bytes_per_s();
    estimate.disk_s = std::max(estimate.disk_s, part * (both_s + rest_s));
  }
  return estimate;
}

std::string TextOf(const StepEstimate& estimate) {
  std::vector<std::string> parts;
  if (estimate.disk_bytes != 0) {
    parts.push_back(absl::StrCat(
        Mebibytes(estimate.disk_bytes), " on disk in ",
        estimate.disk_s > 0 ? absl::StrFormat("%.3f s", estimate.disk_s)
                            : "a time that is not known"));
  }
  if (estimate.memory_s > 0) {
    parts.push_back(
        absl::StrFormat("the state in memory in %.3f s", estimate.memory_s));
  }
  if (parts.empty()) return "what a step takes is not known";
  std::string text =
      absl::StrCat("a step moves ", absl::StrJoin(parts, " and "));
  if (estimate.disk_s > 0 && estimate.memory_s > 0) {
    absl::StrAppend(&text, ": the ",
                    estimate.disk_s > estimate.memory_s ? "disk" : "memory",
                    " is the limit");
  }
  return text;
}

}  // namespace optstate::session
