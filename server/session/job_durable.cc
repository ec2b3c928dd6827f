// Jobs whose records are on disk: their store, what is durable, and their
// return after a restart without memory.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cast.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "server/session/admission.h"
#include "server/session/durable_job.h"
#include "server/session/job_impl.h"
#include "server/session/job_storage.h"
#include "spdlog/spdlog.h"

namespace optstate {
namespace {

// Beside the state folder while that is being made from the disk: the folder is
// then not whole.
constexpr char kRestoringFile[] = "/restoring";

}  // namespace

uint64_t JobImpl::SubGroupElements(const JobDescription& description) const {
  // A job of a former build has none of its own.
  return description.storage.sub_group_elements() != 0
             ? description.storage.sub_group_elements()
             : options_.config.engine().subgroup_elements();
}

NvmeStore::Sizes JobImpl::SwapSizesOf(const JobDescription& description) const {
  return NvmeStore::SizesOf(
      description.layout, SubGroupElements(description),
      {.is_durable = IsDurable(description.storage),
       .directories =
           static_cast<uint32_t>(options_.config.nvme().directories_size()),
       .job_bytes = DurableJobBytes(description.layout,
                                    SerializeDescription(description))});
}

absl::StatusOr<std::unique_ptr<StateStore>> JobImpl::MakeStore(
    const DurableCommit* restored) {
  const JobDescription& what = shape_->description;
  nvme_ = nullptr;
  if (!UsesDisk(what.storage)) {
    return tier_->MakeStore(&layout_of_job(), SubGroupElements(what));
  }
  NvmeStore::Options options;
  options.directories = DiskDirectoriesOf(options_.config, options_.name);
  if (options.directories.empty()) {
    return absl::FailedPreconditionError(
        "the job's records are on disk, and this daemon has no directory for "
        "them: start optstated with the --nvme-dir that it had");
  }
  OPTSTATE_RETURN_IF_ERROR(MakeDiskDirectories(
      options.directories, options_.uid, IsDurable(what.storage)));
  OPTSTATE_ASSIGN_OR_RETURN(options.engine, MakeDiskEngine(options_.config));
  const NvmeStore::Sizes sizes = SwapSizesOf(what);
  const absl::Span<std::byte> frames = tier_->frames();
  options.frames = frames.first(frames.size() / sizes.frame * sizes.frame);
  options.table = tier_->frame_table();
  options.incarnation = tier_->control()->incarnation;
  options.is_durable = IsDurable(what.storage);
  options.job_bytes = DurableJobBytes(what.layout, SerializeDescription(what));
  options.restored = restored;
  OPTSTATE_ASSIGN_OR_RETURN(
      std::unique_ptr<NvmeStore> store,
      NvmeStore::Open(&layout_of_job(), SubGroupElements(what), tier_->Arrays(),
                      std::move(options)));
  spdlog::info(
      "records are swapped: job={} io={} frames={} records={} frame_bytes={} "
      "durable={}",
      options_.name, store->io_engine_name(), frames.size() / sizes.frame,
      sizes.records, sizes.frame, IsDurable(what.storage));
  nvme_ = store.get();
  return store;
}

bool JobImpl::IsCommitDue() const {
  const v1::StorageSettings& storage = shape_->description.storage;
  switch (storage.durability()) {
    case v1::DURABILITY_KIND_STEP:
      return true;
    case v1::DURABILITY_KIND_EVERY:
      return record().committed_step % storage.every_steps() == 0;
    case v1::DURABILITY_KIND_INTERVAL:
      return options_.clock() - commit_requested_at_ >=
             absl::Milliseconds(storage.interval_ms());
    default:
      return false;
  }
}

// Makes the present step durable: with durability "step" before this returns,
// else while training goes on.
absl::Status JobImpl::MakeDurable() {
  commit_requested_at_ = options_.clock();
  absl::Status status = nvme_->RequestCommit(
      record().committed_step,
      SerializeDurableJob(shape_->text, record(), *store_));
  if (status.ok() &&
      shape_->description.storage.durability() == v1::DURABILITY_KIND_STEP) {
    status = nvme_->AwaitCommit();
  }
  if (status.ok()) return status;
  return FailInside(
      absl::StrCat("the durable commit of step ", record().committed_step),
      status);
}

absl::Status JobImpl::MakeDurableIfDue(bool is_load) {
  if (nvme_ == nullptr || !IsDurable(shape_->description.storage) ||
      !HasWholeState()) {
    return absl::OkStatus();
  }
  return is_load || IsCommitDue() ? MakeDurable() : absl::OkStatus();
}

// Makes a step durable that a former engine had recorded and not answered: the
// rank that asks for it again is answered at once.
absl::Status JobImpl::AdoptCommit() {
  if (nvme_ == nullptr || recovery_.has_value() || !HasWholeState() ||
      shape_->description.storage.durability() != v1::DURABILITY_KIND_STEP ||
      nvme_->durable_step() == record().committed_step) {
    return absl::OkStatus();
  }
  return MakeDurable();
}

// An orderly end makes the last step durable, so that none is lost when the
// machine is switched off next.
void JobImpl::EndDurably() {
  const absl::MutexLock lock(&mu_);
  if (nvme_ == nullptr || !failure_.ok() || recovery_.has_value() ||
      !IsDurable(shape_->description.storage) || !HasWholeState() ||
      load_.active()) {
    return;
  }
  nvme_->AwaitCommit().IgnoreError();
  if (nvme_->durable_step() == record().committed_step) return;
  absl::Status status = MakeDurable();
  if (status.ok()) status = nvme_->AwaitCommit();
  if (!status.ok()) {
    spdlog::error("step {} is not durable, {} is: {}", record().committed_step,
                  nvme_->durable_step(), status.ToString());
  }
}

// Makes the state folder anew from the last durable commit on disk. NOT_FOUND:
// there is none.
absl::Status JobImpl::RestoreFromDisk() {
  const std::vector<std::string> directories =
      DiskDirectoriesOf(options_.config, options_.name);
  if (directories.empty()) return absl::NotFoundError("no disk");
  OPTSTATE_RETURN_IF_ERROR(CheckHasCommits(directories));
  DurableCommit commit;
  {
    OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<io::IoEngine> engine,
                              MakeDiskEngine(options_.config));
    OPTSTATE_ASSIGN_OR_RETURN(commit,
                              NvmeStore::ReadCommit(engine.get(), directories));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const DurableJob job, ParseDurableJob(commit.job));
  OPTSTATE_ASSIGN_OR_RETURN(JobDescription description,
                            ParseDescription(job.description));
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<Shape> shape,
                            MakeShape(std::move(description)));
  const JobDescription& what = shape->description;
  const size_t parameters = what.layout.parameters().size();
  if (job.step_counts.size() != parameters ||
      (!job.scalars.empty() && job.scalars.size() != parameters)) {
    return absl::DataLossError(absl::StrCat(
        "commits: counts of ", job.step_counts.size(), " and scalars of ",
        job.scalars.size(), " parameters, the layout has ", parameters));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const AdmissionLock lock,
                            AdmissionLock::Take(StateDir()));
  OPTSTATE_RETURN_IF_ERROR(AdmitShape(what));
  const std::string marker = options_.directory + kRestoringFile;
  const UniqueFd marked(
      ::open(marker.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  if (!marked.ok()) return OsError(errno, absl::StrCat("create ", marker));
  OPTSTATE_ASSIGN_OR_RETURN(
      tier_,
      HostTier::Create(options_.directory, what.layout, HostArraysOf(what),
                       job.description, commit.incarnation));
  PublishRecord(job.record, tier_->control());
  OPTSTATE_RETURN_IF_ERROR(UseShape(std::move(shape), &commit));
  std::copy(job.step_counts.begin(), job.step_counts.end(),
            store_->step_counts().begin());
  std::copy(job.scalars.begin(), job.scalars.end(), store_->scalars().begin());
  OPTSTATE_RETURN_IF_ERROR(nvme_->RestoreParameters());
  OPTSTATE_RETURN_IF_ERROR(CastParametersFromMasters());
  ::unlink(marker.c_str());
  spdlog::info("job restored from disk: job={} step={}", options_.name,
               record().committed_step);
  return absl::OkStatus();
}

// Parameters with float32 masters are not on disk: they are these, rounded.
absl::Status JobImpl::CastParametersFromMasters() {
  for (uint32_t p = 0; p < parameter_count(); ++p) {
    if (layout_of_job().master_format(p) != MasterFormat::kFloat32) continue;
    const ParameterSpec& spec = layout_of_job().parameters()[p];
    OPTSTATE_RETURN_IF_ERROR(store_->ForEachRecord(
        p, 0, static_cast<uint64_t>(spec.numel), StateStore::Access::kRead,
        [&](const RecordView& record, uint64_t begin, uint64_t numel) {
          CastFromFloat(spec.dtype,
                        reinterpret_cast<const float*>(record.master(p, begin)),
                        record.parameter(p, begin), numel);
        }));
  }
  return absl::OkStatus();
}

void JobImpl::DescribeDisk(v1::DiskState* disk) const {
  const NvmeStore::Counters counters = nvme_->counters();
  const NvmeStore::Sizes sizes = SwapSizesOf(shape_->description);
  disk->set_io_engine(nvme_->io_engine_name());
  for (const std::string& directory :
       DiskDirectoriesOf(options_.config, options_.name)) {
    disk->add_directories(directory);
  }
  disk->set_records(sizes.records);
  disk->set_frames(tier_->frames().size() / sizes.frame);
  disk->set_frame_bytes(sizes.frame);
  disk->set_durable_step(nvme_->durable_step());
  disk->set_commits(counters.commits);
  disk->set_bytes_read(counters.bytes_read);
  disk->set_bytes_written(counters.bytes_written);
}

// Removes a state folder that was not made to its end from the disk.
absl::Status JobImpl::DropHalfRestored() const {
  const std::string marker = options_.directory + kRestoringFile;
  if (::access(marker.c_str(), F_OK) != 0) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(HostTier::Remove(options_.directory));
  ::unlink(marker.c_str());
  return absl::OkStatus();
}

}  // namespace optstate
