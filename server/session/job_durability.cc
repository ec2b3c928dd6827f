#include "server/session/job_durability.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/disk_claim.h"
#include "server/session/durable_job.h"
#include "server/session/job_storage.h"
#include "spdlog/spdlog.h"
#include "storage/tiers/nvme/frame_table.h"

namespace optstate::session {

uint64_t JobDurability::SubGroupElements(
    const JobDescription& description) const {
  // A job of a former build has none of its own.
  return description.storage.sub_group_elements() != 0
             ? description.storage.sub_group_elements()
             : job_.options.config.engine().subgroup_elements();
}

nvme::NvmeStore::Sizes JobDurability::SwapSizesOf(
    const JobDescription& description) const {
  return nvme::NvmeStore::SizesOf(
      description.layout, SubGroupElements(description),
      {.is_durable = IsDurable(description.storage),
       .directories =
           static_cast<uint32_t>(job_.options.config.nvme().directories_size()),
       .job_bytes = DurableJobBytes(description.layout,
                                    SerializeDescription(description))});
}

absl::StatusOr<std::unique_ptr<storage::StateStore>> JobDurability::MakeStore(
    const nvme::DurableCommit* restored) {
  const JobDescription& what = job_.shape->description;
  job_.nvme = nullptr;
  if (!UsesDisk(what.storage)) {
    if (job_.options.make_host_store) {
      return job_.options.make_host_store(
          &job_.layout(), SubGroupElements(what), job_.tier->Arrays(),
          job_.tier->control()->incarnation);
    }
    return job_.tier->MakeStore(&job_.layout(), SubGroupElements(what));
  }
  nvme::NvmeStore::Options options;
  options.directories =
      DiskDirectoriesOf(job_.options.config, job_.options.name);
  if (options.directories.empty()) {
    return absl::FailedPreconditionError(
        "the job's records are on disk, and this daemon has no directory for "
        "them: start optstated with the --nvme-dir that it had");
  }
  OPTSTATE_RETURN_IF_ERROR(ClaimDiskFolders(
      options.directories,
      {.incarnation = job_.tier->control()->incarnation,
       .owner = job_.options.uid,
       .job_directory = job_.options.directory,
       .is_new = restored == nullptr &&
                 !nvme::FrameTable::IsMade(job_.tier->frame_table())}));
  if (IsDurable(what.storage)) {
    OPTSTATE_RETURN_IF_ERROR(MarkDurable(options.directories));
  }
  OPTSTATE_ASSIGN_OR_RETURN(options.engine,
                            MakeDiskEngine(job_.options.config));
  const nvme::NvmeStore::Sizes sizes = SwapSizesOf(what);
  const absl::Span<std::byte> frames = job_.tier->frames();
  options.frames = frames.first(frames.size() / sizes.frame * sizes.frame);
  options.table = job_.tier->frame_table();
  options.incarnation = job_.tier->control()->incarnation;
  options.is_durable = IsDurable(what.storage);
  options.job_bytes = DurableJobBytes(what.layout, SerializeDescription(what));
  options.restored = restored;
  OPTSTATE_ASSIGN_OR_RETURN(
      std::unique_ptr<nvme::NvmeStore> store,
      nvme::NvmeStore::Open(&job_.layout(), SubGroupElements(what),
                            job_.tier->Arrays(), std::move(options)));
  spdlog::info(
      "records are swapped: job={} io={} frames={} records={} frame_bytes={} "
      "durable={}",
      job_.options.name, store->io_engine_name(), frames.size() / sizes.frame,
      sizes.records, sizes.frame, IsDurable(what.storage));
  job_.nvme = store.get();
  return store;
}

absl::Status JobDurability::FitFrames() {
  if (job_.nvme == nullptr) return absl::OkStatus();
  const nvme::NvmeStore::Sizes sizes = SwapSizesOf(job_.shape->description);
  const uint64_t bytes = FrameBytesOf(job_.shape->description.storage, sizes);
  if (bytes == job_.tier->frames().size()) return absl::OkStatus();
  return job_.MakePass([&] { return ChangeFrames(bytes, sizes.frame); });
}

absl::Status JobDurability::ChangeFrames(uint64_t bytes, uint64_t frame_bytes) {
  if (bytes > job_.tier->frames().size()) {
    OPTSTATE_RETURN_IF_ERROR(job_.tier->ReserveFramesAhead(bytes));
  }
  return job_.nvme->ChangeFrames(static_cast<uint32_t>(bytes / frame_bytes),
                                 [&](absl::Span<std::byte>* frames) {
                                   // Operators may look at the job while a pass
                                   // is made.
                                   const absl::MutexLock lock(&job_.lock.mu);
                                   const absl::Status resized =
                                       job_.tier->ResizeFrames(bytes);
                                   *frames = job_.tier->frames();
                                   return resized;
                                 });
}

bool JobDurability::IsCommitDue() const {
  const v1::StorageSettings& storage = job_.shape->description.storage;
  switch (storage.durability()) {
    case v1::DURABILITY_KIND_STEP:
      return true;
    case v1::DURABILITY_KIND_EVERY:
      return job_.record().committed_step % storage.every_steps() == 0;
    case v1::DURABILITY_KIND_INTERVAL:
      return job_.options.clock() - commit_requested_at_ >=
             absl::Milliseconds(storage.interval_ms());
    default:
      return false;
  }
}

absl::Status JobDurability::MakeDurable() {
  commit_requested_at_ = job_.options.clock();
  const uint64_t step = job_.record().committed_step;
  std::string job =
      SerializeDurableJob(job_.shape->text, job_.record(), *job_.store);
  const bool waits =
      job_.shape->description.storage.durability() == v1::DURABILITY_KIND_STEP;
  const absl::Status status = job_.MakePass([&] {
    absl::Status requested = job_.nvme->RequestCommit(step, std::move(job));
    return requested.ok() && waits ? job_.nvme->AwaitCommit() : requested;
  });
  if (status.ok()) return status;
  return job_.FailInside(absl::StrCat("the durable commit of step ", step),
                         status);
}

absl::Status JobDurability::MakeDurableIfDue(bool is_load) {
  if (job_.nvme == nullptr || !IsDurable(job_.shape->description.storage) ||
      !job_.HasWholeState()) {
    return absl::OkStatus();
  }
  return is_load || IsCommitDue() ? MakeDurable() : absl::OkStatus();
}

// Compares records, for a load leaves the step as it is, and a step 0 that is
// durable differs from none.
JobDurability::Durable JobDurability::WhatIsDurable() const {
  const absl::StatusOr<DurableJob> last =
      ParseDurableJob(job_.nvme->durable_job());
  if (!last.ok()) return {};
  const storage::StepRecord& now = job_.record();
  return {.step = last->record.committed_step == now.committed_step,
          .loads = last->record.loads_finished == now.loads_finished};
}

absl::Status JobDurability::AdoptCommit() {
  if (job_.nvme == nullptr || job_.recovery.has_value() ||
      !IsDurable(job_.shape->description.storage) || !job_.HasWholeState()) {
    return absl::OkStatus();
  }
  const Durable durable = WhatIsDurable();
  const v1::StorageSettings& storage = job_.shape->description.storage;
  const uint64_t every = storage.every_steps();
  // With "every N" the commit of step N may have been under way when the former
  // engine ended.
  const bool needs_step = storage.durability() == v1::DURABILITY_KIND_STEP ||
                          (storage.durability() == v1::DURABILITY_KIND_EVERY &&
                           job_.record().committed_step / every >
                               job_.nvme->durable_step() / every);
  if (durable.loads && (durable.step || !needs_step)) return absl::OkStatus();
  return MakeDurable();
}

// An orderly end makes the last step durable, so that none is lost when the
// machine is switched off next.
void JobDurability::CommitFinally(bool loading) {
  if (job_.nvme == nullptr || !job_.failure.ok() || job_.recovery.has_value() ||
      !IsDurable(job_.shape->description.storage) || !job_.HasWholeState() ||
      loading) {
    return;
  }
  const auto await = [&] { return job_.nvme->AwaitCommit(); };
  job_.MakePass(await).IgnoreError();
  const Durable durable = WhatIsDurable();
  if (durable.step && durable.loads) return;
  absl::Status status = MakeDurable();
  if (status.ok()) status = job_.MakePass(await);
  if (!status.ok()) {
    spdlog::error("step {} is not durable, {} is: {}",
                  job_.record().committed_step, job_.nvme->durable_step(),
                  status.ToString());
  }
}

void JobDurability::DescribeDisk(v1::DiskState* disk) const {
  const nvme::NvmeStore::Counters counters = job_.nvme->counters();
  const nvme::NvmeStore::Sizes sizes = SwapSizesOf(job_.shape->description);
  disk->set_io_engine(job_.nvme->io_engine_name());
  for (const std::string& directory :
       DiskDirectoriesOf(job_.options.config, job_.options.name)) {
    disk->add_directories(directory);
  }
  disk->set_records(sizes.records);
  disk->set_frames(job_.tier->frames().size() / sizes.frame);
  disk->set_frame_bytes(sizes.frame);
  disk->set_durable_step(job_.nvme->durable_step());
  disk->set_commits(counters.commits);
  disk->set_bytes_read(counters.bytes_read);
  disk->set_bytes_written(counters.bytes_written);
  disk->set_step_bytes_read(counters.last_pass.bytes_read);
  disk->set_step_bytes_written(counters.last_pass.bytes_written);
  disk->set_step_cpu_ns(counters.last_pass.cpu_ns);
  disk->set_cpu_ns(counters.cpu_ns);
  const uint64_t bytes = counters.bytes_read + counters.bytes_written;
  if (bytes != 0) {
    // Nanoseconds a byte are seconds a GB.
    disk->set_cpu_ms_per_gb(static_cast<double>(counters.cpu_ns) * 1e3 /
                            static_cast<double>(bytes));
  }
  for (const nvme::DirectoryCounters& of : job_.nvme->directory_counters()) {
    v1::DirectoryIo* io = disk->add_directory_io();
    io->set_bytes_read(of.bytes_read);
    io->set_bytes_written(of.bytes_written);
    io->set_reads(of.reads);
    io->set_writes(of.writes);
    io->set_syncs(of.syncs);
    io->set_errors(of.errors);
    io->set_queue_depth(of.queue_depth);
  }
}

}  // namespace optstate::session
