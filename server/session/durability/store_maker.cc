#include "server/session/durability/store_maker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "server/access/quotas.h"
#include "server/config/job_weight.h"
#include "server/session/durability/disk_claim.h"
#include "server/session/durability/durable_job.h"
#include "server/session/durability/job_extents.h"
#include "server/session/durability/job_storage.h"
#include "server/session/durability/traced_io_engine.h"
#include "spdlog/spdlog.h"
#include "storage/disk_folder.h"
#include "storage/io/disk_share.h"
#include "storage/io/shared_io_engine.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/nvme_store.h"

namespace optstate::session {
namespace {

// None of a job of a former build, whose table knows them.
std::vector<uint32_t> WeightsOf(const JobDescription& description) {
  const auto& weights = description.storage.directory_weights();
  return {weights.begin(), weights.end()};
}

// Has the engine use no more of the disks than the job's part of its owner's
// part while other jobs of the node use them.
std::unique_ptr<io::IoEngine> ShareDisks(const JobContext& job,
                                         std::unique_ptr<io::IoEngine> engine) {
  const uint32_t weight =
      config::WeightOf(job.options.config.engine(), job.options.name);
  const uid_t owner = job.options.uid;
  access::Quotas quotas(job.options.config);
  absl::StatusOr<std::unique_ptr<io::DiskShare>> share =
      io::DiskShare::Open(job.StateDir() + "/disk_shares", std::max(weight, 1u),
                          {.id = owner, .weight = quotas.WeightOf(owner)});
  if (share.ok())
    return io::ShareIoEngine(std::move(engine), *std::move(share));
  spdlog::warn("disks are not shared by weight: job={} error=\"{}\"",
               job.options.name, share.status().ToString());
  return engine;
}

// Says once which files of other arrangements were removed: the former one's,
// or what an engine, or a loss of power, in the middle of one had left.
void LogRemoved(const JobContext& job, const std::vector<std::string>& left) {
  std::vector<std::string> removed;
  for (const std::string& path : left) {
    if (!storage::MayExist(path)) removed.push_back(path);
  }
  if (removed.empty()) return;
  spdlog::info(
      "removed what was left of other arrangements of the records: job={} "
      "files={}",
      job.options.name, absl::StrJoin(removed, ","));
}

uint64_t ElementsOfSubGroup(const v1::DaemonConfig& config,
                            const JobDescription& description) {
  // A job of a former build has none of its own.
  return description.storage.sub_group_elements() != 0
             ? description.storage.sub_group_elements()
             : config.engine().subgroup_elements();
}

storage::SwapSizes SwapSizesOf(const v1::DaemonConfig& config,
                               const JobDescription& description,
                               bool has_sections) {
  return nvme::NvmeStore::SizesOf(
      description.layout, ElementsOfSubGroup(config, description),
      {.is_durable = IsDurable(description.storage),
       .directories = DirectoryCountOf(config, description.storage),
       .job_bytes = DurableJobBytes(description.layout,
                                    SerializeDescription(description)),
       .weights = WeightsOf(description),
       .holds_parameters = description.storage.parameters_on_disk(),
       .has_sections = has_sections});
}

}  // namespace

uint64_t SubGroupElements(const JobContext& job,
                          const JobDescription& description) {
  return ElementsOfSubGroup(job.options.config, description);
}

storage::SwapSizes SwapSizesOf(const JobContext& job,
                               const JobDescription& description) {
  return SwapSizesOf(job.options.config, description,
                     job.tier.has_value() && nvme::FrameTable::HasSections(
                                                 job.tier->frame_table()));
}

absl::StatusOr<uint64_t> ParameterCacheBytesOf(
    const JobContext& job, const JobDescription& description) {
  return ParameterCacheBytesOf(job.options.config, description);
}

absl::StatusOr<uint64_t> ParameterCacheBytesOf(
    const v1::DaemonConfig& config, const JobDescription& description) {
  if (!description.storage.parameters_on_disk()) return 0;
  // Records with parameters have the same form, whichever build made them.
  return ParameterCacheBytesOf(
      description.storage,
      SwapSizesOf(config, description, /*has_sections=*/false));
}

uint64_t FrameBytesOfTable(const JobContext& job) {
  return nvme::FrameTable::FrameBytesOf(job.tier->frame_table());
}

absl::StatusOr<std::unique_ptr<storage::StateStore>> MakeStore(
    JobContext* job, const storage::DurableCommit* restored) {
  const JobDescription& what = job->shape->description;
  if (!UsesDisk(what.storage)) {
    if (job->options.make_host_store) {
      return job->options.make_host_store(
          &job->layout(), SubGroupElements(*job, what), job->tier->Memory(),
          job->tier->control()->incarnation);
    }
    return job->tier->MakeStore(&job->layout(), SubGroupElements(*job, what));
  }
  nvme::NvmeStore::Options options;
  OPTSTATE_ASSIGN_OR_RETURN(
      options.directories,
      OwnDirectoriesOf(job->options.config, job->options.name, what.storage));
  options.arrangement = what.storage.arrangement();
  const v1::NvmeSettings& nvme = job->options.config.nvme();
  const bool is_new = restored == nullptr &&
                      !nvme::FrameTable::IsMade(job->tier->frame_table());
  const std::vector<std::string> all_directories =
      DiskDirectoriesOf(job->options.config, job->options.name);
  if (!is_new) {
    OPTSTATE_RETURN_IF_ERROR(
        CheckDiskIdentities(all_directories, job->tier->control()->incarnation,
                            static_cast<uint32_t>(options.directories.size())));
  }
  const std::vector<std::string> directories = options.directories;
  OPTSTATE_RETURN_IF_ERROR(ClaimDiskFolders(
      directories, {.incarnation = job->tier->control()->incarnation,
                    .owner = job->options.uid,
                    .job_directory = job->options.directory,
                    .is_new = is_new,
                    .devices = DevicesOf(nvme)}));
  // The state of such a job may be many times the memory, and so may a load.
  job->tier->SetLoadLogFolder(what.storage.placement() == v1::PLACEMENT_NVME
                                  ? options.directories[0]
                                  : "");
  if (is_new) job->tier->DropLoadLog();
  job->verifier.UseNote(options.directories[0],
                        job->tier->control()->incarnation);
  const OwnArrangement own = {
      all_directories, static_cast<uint32_t>(directories.size()),
      what.storage.arrangement(), job->tier->control()->incarnation};
  const std::vector<std::string> left =
      is_new ? std::vector<std::string>() : FindOtherArrangements(own);
  const storage::SwapSizes sizes = SwapSizesOf(*job, what);
  OPTSTATE_ASSIGN_OR_RETURN(
      options.extents,
      TakeExtents(nvme, job->options.name, sizes.records_by_directory,
                  options.arrangement, is_new));
  if (IsDurable(what.storage)) {
    OPTSTATE_RETURN_IF_ERROR(MarkDurable(options.directories));
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      options.engine,
      MakeDiskEngine(job->options.config, job->options.disk_bytes));
  options.engine = TraceIoEngine(std::move(options.engine), nvme, &job->trace);
  options.engine = ShareDisks(*job, std::move(options.engine));
  const absl::Span<std::byte> frames = job->tier->frames();
  options.frames = frames.first(frames.size() / sizes.frame * sizes.frame);
  options.table = job->tier->frame_table();
  options.incarnation = job->tier->control()->incarnation;
  options.weights = WeightsOf(what);
  options.is_durable = IsDurable(what.storage);
  options.job_bytes = DurableJobBytes(what.layout, SerializeDescription(what));
  options.restored = restored;
  options.holds_parameters = what.storage.parameters_on_disk();
  OPTSTATE_ASSIGN_OR_RETURN(options.parameter_cache_bytes,
                            ParameterCacheBytesOf(what.storage, sizes));
  OPTSTATE_ASSIGN_OR_RETURN(
      std::unique_ptr<nvme::NvmeStore> store,
      nvme::NvmeStore::Open(&job->layout(), SubGroupElements(*job, what),
                            job->tier->Memory(), std::move(options)));
  // The store has made the commits on disk those of its arrangement.
  RemoveOtherArrangements(own);
  LogRemoved(*job, left);
  spdlog::info(
      "records are swapped: job={} io={} frames={} records={} frame_bytes={} "
      "durable={}",
      job->options.name, store->swap_state()->io_engine,
      frames.size() / sizes.frame, sizes.records, sizes.frame,
      IsDurable(what.storage));
  return store;
}

absl::StatusOr<storage::DurableCommit> ReadDurableCommit(
    const JobContext& job, const std::vector<std::string>& directories) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<io::IoEngine> engine,
      MakeDiskEngine(job.options.config, job.options.disk_bytes));
  return nvme::NvmeStore::ReadCommit(engine.get(), directories);
}

}  // namespace optstate::session
