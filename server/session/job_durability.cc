#include "server/session/job_durability.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/durable_job.h"
#include "server/session/job_storage.h"
#include "spdlog/spdlog.h"

namespace optstate {

uint64_t JobDurability::SubGroupElements(
    const JobDescription& description) const {
  // A job of a former build has none of its own.
  return description.storage.sub_group_elements() != 0
             ? description.storage.sub_group_elements()
             : job_.options.config.engine().subgroup_elements();
}

NvmeStore::Sizes JobDurability::SwapSizesOf(
    const JobDescription& description) const {
  return NvmeStore::SizesOf(
      description.layout, SubGroupElements(description),
      {.is_durable = IsDurable(description.storage),
       .directories =
           static_cast<uint32_t>(job_.options.config.nvme().directories_size()),
       .job_bytes = DurableJobBytes(description.layout,
                                    SerializeDescription(description))});
}

absl::StatusOr<std::unique_ptr<StateStore>> JobDurability::MakeStore(
    const DurableCommit* restored) {
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
  NvmeStore::Options options;
  options.directories =
      DiskDirectoriesOf(job_.options.config, job_.options.name);
  if (options.directories.empty()) {
    return absl::FailedPreconditionError(
        "the job's records are on disk, and this daemon has no directory for "
        "them: start optstated with the --nvme-dir that it had");
  }
  OPTSTATE_RETURN_IF_ERROR(MakeDiskDirectories(
      options.directories, job_.options.uid, IsDurable(what.storage)));
  OPTSTATE_ASSIGN_OR_RETURN(options.engine,
                            MakeDiskEngine(job_.options.config));
  const NvmeStore::Sizes sizes = SwapSizesOf(what);
  const absl::Span<std::byte> frames = job_.tier->frames();
  options.frames = frames.first(frames.size() / sizes.frame * sizes.frame);
  options.table = job_.tier->frame_table();
  options.incarnation = job_.tier->control()->incarnation;
  options.is_durable = IsDurable(what.storage);
  options.job_bytes = DurableJobBytes(what.layout, SerializeDescription(what));
  options.restored = restored;
  OPTSTATE_ASSIGN_OR_RETURN(
      std::unique_ptr<NvmeStore> store,
      NvmeStore::Open(&job_.layout(), SubGroupElements(what),
                      job_.tier->Arrays(), std::move(options)));
  spdlog::info(
      "records are swapped: job={} io={} frames={} records={} frame_bytes={} "
      "durable={}",
      job_.options.name, store->io_engine_name(), frames.size() / sizes.frame,
      sizes.records, sizes.frame, IsDurable(what.storage));
  job_.nvme = store.get();
  return store;
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

// Makes a step durable that a former engine had recorded and not answered: the
// rank that asks for it again is answered at once.
absl::Status JobDurability::AdoptCommit() {
  if (job_.nvme == nullptr || job_.recovery.has_value() ||
      !job_.HasWholeState() ||
      job_.shape->description.storage.durability() !=
          v1::DURABILITY_KIND_STEP ||
      job_.nvme->durable_step() == job_.record().committed_step) {
    return absl::OkStatus();
  }
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
  if (job_.nvme->durable_step() == job_.record().committed_step) return;
  absl::Status status = MakeDurable();
  if (status.ok()) status = job_.MakePass(await);
  if (!status.ok()) {
    spdlog::error("step {} is not durable, {} is: {}",
                  job_.record().committed_step, job_.nvme->durable_step(),
                  status.ToString());
  }
}

void JobDurability::DescribeDisk(v1::DiskState* disk) const {
  const NvmeStore::Counters counters = job_.nvme->counters();
  const NvmeStore::Sizes sizes = SwapSizesOf(job_.shape->description);
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
  for (const DirectoryCounters& of : job_.nvme->directory_counters()) {
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

}  // namespace optstate
