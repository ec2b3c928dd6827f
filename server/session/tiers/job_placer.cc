#include "server/session/tiers/job_placer.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/workers/memory_bandwidth_record.h"
#include "server/session/durability/job_storage.h"
#include "server/session/durability/store_maker.h"
#include "server/session/tiers/auto_placement.h"
#include "server/session/tiers/node_budget.h"
#include "spdlog/spdlog.h"
#include "storage/swap_sizes.h"

namespace optstate::session {
namespace {

// Sets what the settings lack, and checks their budget. A default that is too
// small becomes the least.
absl::Status Complete(const JobContext& job, const v1::StorageSettings& asked,
                      const DiskRates& rates, JobDescription* description) {
  const v1::DaemonConfig& config = job.options.config;
  v1::StorageSettings& storage = description->storage;
  storage = ResolveStorage(asked, config);
  storage.set_placement_reason(asked.placement_reason());
  if (!UsesDisk(storage)) return absl::OkStatus();
  const std::vector<uint32_t> weights = DirectoryWeights(config.nvme(), rates);
  storage.mutable_directory_weights()->Assign(weights.begin(), weights.end());
  if (storage.placement() != v1::PLACEMENT_NVME) return absl::OkStatus();
  const storage::SwapSizes sizes = SwapSizesOf(job, *description);
  if (asked.host_budget_bytes() != 0) {
    return CheckBudgetHolds(asked.host_budget_bytes(), sizes);
  }
  const uint64_t least = LeastBudget(sizes);
  if (storage.host_budget_bytes() < least) {
    spdlog::info(
        "the default host budget of {} bytes has no room for {} records: "
        "job={} host_budget={}",
        storage.host_budget_bytes(), storage::kSwapFramesMin, job.options.name,
        least);
    storage.set_host_budget_bytes(least);
  }
  return absl::OkStatus();
}

// Returns the sizes of the job if its records are swapped.
storage::SwapSizes SwappedSizes(const JobContext& job, const DiskRates& rates,
                                JobDescription description) {
  v1::StorageSettings& storage = description.storage;
  storage = ResolveStorage(storage, job.options.config);
  const std::vector<uint32_t> weights =
      DirectoryWeights(job.options.config.nvme(), rates);
  storage.mutable_directory_weights()->Assign(weights.begin(), weights.end());
  return SwapSizesOf(job, description);
}

}  // namespace

DiskRates RatesFor(const v1::StorageSettings& asked, JobContext* job) {
  const v1::DaemonConfig& config = job->options.config;
  const v1::NvmeSettings& nvme = config.nvme();
  const bool splits = nvme.directories_size() > 1 && UsesDisk(asked) &&
                      nvme.directory_weights().empty();
  const bool chooses =
      nvme.directories_size() > 0 && asked.placement() == v1::PLACEMENT_AUTO;
  if (!splits && !chooses) return RecordedDiskRates(job->StateDir(), nvme);
  DiskRates rates;
  job->MakePass([&] {
       rates = MeasureDiskRates(job->StateDir(), config, /*anew=*/false);
       return absl::OkStatus();
     })
      .IgnoreError();  // always OK: MakePass returns what the pass does
  return rates;
}

absl::Status PlaceJob(
    const JobContext& job, const DiskRates& rates,
    absl::FunctionRef<absl::Status(const JobDescription&)> admits,
    JobDescription* description) {
  const v1::StorageSettings asked = description->storage;
  const auto try_settings = [&](const v1::StorageSettings& settings) {
    OPTSTATE_RETURN_IF_ERROR(Complete(job, settings, rates, description));
    return admits(*description);
  };
  if (asked.placement() != v1::PLACEMENT_AUTO) {
    v1::StorageSettings plain = asked;
    plain.clear_placement_reason();
    return try_settings(plain);
  }
  const v1::NvmeSettings& nvme = job.options.config.nvme();
  const PlacementQuestion question = {
      .asked = asked,
      .sizes = SwappedSizes(job, rates, *description),
      .has_disk = !nvme.directories().empty(),
      .default_budget_bytes = nvme.job_host_budget_bytes(),
      .node_budget_left =
          NodeBudgetLeft(job.StateDir(), nvme, job.options.name)};
  OPTSTATE_ASSIGN_OR_RETURN(v1::StorageSettings chosen,
                            ChoosePlacement(question, try_settings));
  chosen.set_placement_reason(
      absl::StrCat(chosen.placement_reason(), "; ",
                   TextOf(EstimateStep(
                       chosen, question.sizes, rates,
                       scheduler::RecordedMemoryBandwidth(job.StateDir())))));
  spdlog::info("placed: job={} {}", job.options.name,
               chosen.placement_reason());
  return Complete(job, chosen, rates, description);
}

}  // namespace optstate::session
