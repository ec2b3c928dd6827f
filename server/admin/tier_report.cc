#include "server/admin/tier_report.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "server/scheduler/workers/memory_bandwidth_record.h"
#include "server/session/admission.h"
#include "server/session/job_facts.h"
#include "server/session/tiers/auto_placement.h"
#include "server/session/tiers/disk_rates.h"
#include "server/session/tiers/node_budget.h"
#include "storage/allocated_bytes.h"
#include "storage/swap_sizes.h"

namespace optstate::admin {
namespace {

using supervisor::JobSummary;

// A record of AdamW with float32 state.
constexpr uint64_t kBytesOfElement = 12;

struct Space {
  uint64_t capacity_bytes = 0;
  uint64_t free_bytes = 0;
};

absl::StatusOr<Space> SpaceOf(const std::string& directory) {
  struct statvfs info;
  if (::statvfs(directory.c_str(), &info) != 0) {
    return OsError(errno, absl::StrCat("statvfs of ", directory));
  }
  return Space{uint64_t{info.f_blocks} * info.f_frsize,
               uint64_t{info.f_bavail} * info.f_frsize};
}

v1::MemoryTier DescribeMemory(const v1::DaemonConfig& config,
                              const std::vector<JobSummary>& jobs) {
  const std::string& state_dir = config.state_dir();
  v1::MemoryTier memory;
  memory.set_directory(state_dir);
  const absl::StatusOr<Space> space = SpaceOf(state_dir);
  if (space.ok()) memory.set_capacity_bytes(space->capacity_bytes);
  const absl::StatusOr<uint64_t> left =
      session::StateBytesLeft(state_dir, config.limits());
  if (left.ok()) {
    memory.set_free_bytes(*left);
  } else {
    memory.set_problem(std::string(left.status().message()));
  }
  memory.set_budget_bytes(config.nvme().host_budget_bytes());
  memory.set_bytes_per_s(scheduler::RecordedMemoryBandwidth(state_dir));
  std::map<std::string, uint64_t> frames;
  for (const session::BytesOfJob& one : session::FramesOfJobs(state_dir)) {
    frames[one.job] = one.bytes;
    memory.set_frames_bytes(memory.frames_bytes() + one.bytes);
  }
  for (const JobSummary& summary : jobs) {
    v1::TierJob* job = memory.add_jobs();
    job->set_job(summary.name);
    job->set_bytes(storage::AllocatedBytesBelow(summary.directory));
    job->set_frames_bytes(frames[summary.name]);
    memory.set_used_bytes(memory.used_bytes() + job->bytes());
  }
  return memory;
}

// Returns the weights of each job that has some, by name.
std::map<std::string, std::vector<uint32_t>> WeightsOfJobs(
    const std::vector<JobSummary>& jobs) {
  std::map<std::string, std::vector<uint32_t>> weights;
  for (const JobSummary& summary : jobs) {
    v1::Job job;
    session::AddFromFiles(summary.directory, &job);
    weights[summary.name].assign(job.storage().directory_weights().begin(),
                                 job.storage().directory_weights().end());
  }
  return weights;
}

void AddSpace(const v1::NvmeSettings& nvme, int index,
              v1::DirectoryTier* tier) {
  const absl::StatusOr<Space> space = SpaceOf(tier->directory());
  if (!space.ok()) {
    tier->set_problem(std::string(space.status().message()));
    return;
  }
  tier->set_capacity_bytes(space->capacity_bytes);
  uint64_t left = space->free_bytes;
  if (index < nvme.directory_bytes_max_size() &&
      nvme.directory_bytes_max(index) != 0) {
    const uint64_t limit = nvme.directory_bytes_max(index);
    tier->set_limit_bytes(limit);
    left = std::min(left, limit - std::min(limit, tier->used_bytes()));
  }
  tier->set_free_bytes(left);
}

void AddRates(const v1::DirectoryRates& rates, v1::DirectoryTier* tier) {
  if (rates.measured_at_ns() == 0) return;
  tier->set_read_bytes_per_s(rates.read_bytes_per_s());
  tier->set_write_bytes_per_s(rates.write_bytes_per_s());
  tier->set_mixed_bytes_per_s(rates.mixed_bytes_per_s());
  tier->set_io_engine(rates.io_engine());
  session::SetTimestamp(rates.measured_at_ns(), tier->mutable_measured_at());
}

v1::DirectoryTier DescribeDirectory(
    const v1::NvmeSettings& nvme, int index, const session::DiskRates& rates,
    const std::map<std::string, std::vector<uint32_t>>& weights) {
  v1::DirectoryTier tier;
  tier.set_directory(nvme.directories(index));
  for (const session::BytesOfJob& one :
       session::DiskBytesOfJobs(tier.directory())) {
    tier.set_used_bytes(tier.used_bytes() + one.bytes);
    v1::TierJob* job = tier.add_jobs();
    job->set_job(one.job);
    job->set_bytes(one.bytes);
    const auto of_job = weights.find(one.job);
    if (of_job == weights.end()) continue;
    if (static_cast<size_t>(index) < of_job->second.size()) {
      job->set_weight(of_job->second[index]);
    }
  }
  AddSpace(nvme, index, &tier);
  const auto place = static_cast<size_t>(index);
  AddRates(rates.directories[place], &tier);
  if (place < rates.problems.size() && !rates.problems[place].ok()) {
    tier.set_problem(std::string(rates.problems[place].message()));
  }
  const std::vector<uint32_t> all = session::DirectoryWeights(nvme, rates);
  tier.set_weight(all.empty() ? 1 : all[place]);
  return tier;
}

// Returns the sizes of a job of whole records of AdamW that is not durable.
storage::SwapSizes SizesOf(const v1::DaemonConfig& config, uint64_t job_bytes,
                           const v1::DescribeTiersReply& tiers) {
  storage::SwapSizes sizes;
  sizes.frame = config.engine().subgroup_elements() * kBytesOfElement;
  sizes.records = std::max<uint64_t>(
      1, job_bytes / sizes.frame + (job_bytes % sizes.frame != 0 ? 1 : 0));
  sizes.disk = sizes.records * sizes.frame;
  double sum = 0;
  for (const v1::DirectoryTier& one : tiers.directories()) sum += one.weight();
  for (const v1::DirectoryTier& one : tiers.directories()) {
    sizes.directories.push_back(static_cast<uint64_t>(
        static_cast<double>(sizes.disk) * one.weight() / sum));
  }
  return sizes;
}

// Says whether what the tiers have free is enough, as admission will say it of
// a job with its parameters and tables.
absl::Status CheckFree(const v1::DescribeTiersReply& tiers,
                       const storage::SwapSizes& sizes,
                       const v1::StorageSettings& storage) {
  const bool is_nvme = storage.placement() == v1::PLACEMENT_NVME;
  const uint64_t needed = is_nvme ? storage.host_budget_bytes() : sizes.disk;
  const uint64_t free = tiers.memory().has_free_bytes()
                            ? tiers.memory().free_bytes()
                            : std::numeric_limits<uint64_t>::max();
  if (needed > free) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "memory: the job needs ", needed, " bytes, ", free, " are left"));
  }
  for (int i = 0; is_nvme && i < tiers.directories_size(); ++i) {
    const v1::DirectoryTier& tier = tiers.directories(i);
    if (sizes.directories[i] > tier.free_bytes()) {
      return absl::ResourceExhaustedError(absl::StrCat(
          tier.directory(), ": the job needs ", sizes.directories[i],
          " bytes, ", tier.free_bytes(), " are left"));
    }
  }
  return absl::OkStatus();
}

v1::AutoPlacement PlaceOf(const v1::DaemonConfig& config, uint64_t job_bytes,
                          const session::DiskRates& rates,
                          const v1::DescribeTiersReply& tiers) {
  const v1::NvmeSettings& nvme = config.nvme();
  session::PlacementQuestion question;
  question.asked.set_placement(v1::PLACEMENT_AUTO);
  question.sizes = SizesOf(config, job_bytes, tiers);
  question.has_disk = !nvme.directories().empty();
  question.default_budget_bytes = nvme.job_host_budget_bytes();
  question.node_budget_left =
      session::NodeBudgetLeft(config.state_dir(), nvme, /*job=*/"");
  const absl::StatusOr<v1::StorageSettings> chosen = session::ChoosePlacement(
      question, [&](const v1::StorageSettings& storage) {
        absl::Status fits = CheckFree(tiers, question.sizes, storage);
        if (!fits.ok() || storage.placement() != v1::PLACEMENT_NVME) {
          return fits;
        }
        return session::CheckNodeBudget(config.state_dir(), nvme, /*job=*/"",
                                        storage.host_budget_bytes());
      });
  v1::AutoPlacement placement;
  if (!chosen.ok()) {
    placement.set_reason(std::string(chosen.status().message()));
    return placement;
  }
  const session::StepEstimate estimate = session::EstimateStep(
      *chosen, question.sizes, rates, tiers.memory().bytes_per_s());
  placement.set_placement(chosen->placement());
  placement.set_host_budget_bytes(chosen->host_budget_bytes());
  placement.set_step_memory_s(estimate.memory_s);
  placement.set_step_disk_s(estimate.disk_s);
  placement.set_reason(absl::StrCat(chosen->placement_reason(), "; ",
                                    session::TextOf(estimate)));
  return placement;
}

}  // namespace

v1::DescribeTiersReply DescribeTiers(const v1::DaemonConfig& config,
                                     const std::vector<JobSummary>& jobs,
                                     const v1::DescribeTiersRequest& request) {
  const v1::NvmeSettings& nvme = config.nvme();
  const session::DiskRates rates =
      request.measure()
          ? session::MeasureDiskRates(config.state_dir(), config, /*anew=*/true)
          : session::RecordedDiskRates(config.state_dir(), nvme);
  v1::DescribeTiersReply reply;
  *reply.mutable_memory() = DescribeMemory(config, jobs);
  const auto weights = WeightsOfJobs(jobs);
  for (int i = 0; i < nvme.directories_size(); ++i) {
    *reply.add_directories() = DescribeDirectory(nvme, i, rates, weights);
  }
  if (request.job_bytes() != 0) {
    *reply.mutable_auto_placement() =
        PlaceOf(config, request.job_bytes(), rates, reply);
  }
  return reply;
}

}  // namespace optstate::admin
