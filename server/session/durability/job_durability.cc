#include "server/session/durability/job_durability.h"

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/durability/commit_period.h"
#include "server/session/durability/durable_job.h"
#include "server/session/durability/job_storage.h"
#include "server/session/durability/store_maker.h"
#include "spdlog/spdlog.h"
#include "storage/disk_folder.h"
#include "storage/swap_sizes.h"
#include "storage/swap_state.h"

namespace optstate::session {

absl::Status JobDurability::FitFrames() {
  if (!job_.HasDisk()) return absl::OkStatus();
  const storage::SwapSizes sizes = SwapSizesOf(job_, job_.shape->description);
  const uint64_t bytes = FrameBytesOf(job_.shape->description.storage, sizes);
  if (bytes == job_.tier->frames().size()) return absl::OkStatus();
  return job_.MakePass([&] { return ChangeFrames(bytes, sizes.frame); });
}

absl::Status JobDurability::ChangeFrames(uint64_t bytes, uint64_t frame_bytes) {
  if (bytes > job_.tier->frames().size()) {
    OPTSTATE_RETURN_IF_ERROR(job_.tier->ReserveFramesAhead(bytes));
  }
  return job_.store->ChangeFrames(static_cast<uint32_t>(bytes / frame_bytes),
                                  [&](absl::Span<std::byte>* frames) {
                                    // Operators may look at the job while a
                                    // pass is made.
                                    const absl::MutexLock lock(&job_.lock.mu);
                                    absl::Status resized =
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
      return job_.record().committed_step % CommitPeriodSteps(storage) == 0;
    case v1::DURABILITY_KIND_INTERVAL:
      return job_.options.clock() - commit_requested_at_ >=
             absl::Milliseconds(storage.interval_ms());
    default:
      return false;
  }
}

bool JobDurability::WaitsForCommits() const {
  return job_.shape->description.storage.durability() ==
         v1::DURABILITY_KIND_STEP;
}

absl::Status JobDurability::MakeDurable(bool waits) {
  commit_requested_at_ = job_.options.clock();
  const uint64_t step = job_.record().committed_step;
  SerializeDurableJob(job_.shape->text, job_.record(), *job_.store,
                      &commit_text_);
  absl::Status status = job_.MakePass([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(job_.scheduler->CatchUp());
    OPTSTATE_RETURN_IF_ERROR(job_.store->RequestCommit(step, commit_text_));
    return waits ? job_.store->AwaitCommit() : absl::OkStatus();
  });
  if (status.ok()) return status;
  return job_.FailInside(absl::StrCat("the durable commit of step ", step),
                         status);
}

absl::Status JobDurability::MakeDurableIfDue(bool is_load) {
  if (!job_.HasDisk() || !IsDurable(job_.shape->description.storage) ||
      !job_.HasWholeState()) {
    return absl::OkStatus();
  }
  return is_load || IsCommitDue() ? MakeDurable(WaitsForCommits())
                                  : absl::OkStatus();
}

absl::Status JobDurability::MakeDurableNow() {
  if (!job_.HasDisk() || !IsDurable(job_.shape->description.storage) ||
      !job_.HasWholeState()) {
    return absl::OkStatus();
  }
  return MakeDurable(/*waits=*/true);
}

// Compares records, for a load leaves the step as it is, and a step 0 that is
// durable differs from none.
JobDurability::Durable JobDurability::WhatIsDurable() const {
  const absl::StatusOr<DurableJob> last =
      ParseDurableJob(job_.store->durable_job());
  if (!last.ok()) return {};
  const storage::StepRecord& now = job_.record();
  return {.step = last->record.committed_step == now.committed_step,
          .loads = last->record.loads_finished == now.loads_finished};
}

absl::Status JobDurability::CheckMemoryIsNewest() const {
  if (!job_.HasDisk() || !IsDurable(job_.shape->description.storage)) {
    return absl::OkStatus();
  }
  const uint64_t committed = job_.record().committed_step;
  const uint64_t durable = job_.store->durable_step();
  if (durable <= committed) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "job \"", job_.options.name, "\": its files in memory are of step ",
      committed, ", and step ", durable,
      " is durable on disk: they are old, and going on with them would lose "
      "steps. optctl recover ",
      job_.options.name, " --to-durable goes on with step ", durable));
}

absl::Status JobDurability::AdoptCommit() {
  if (!job_.HasDisk() || job_.recovery.has_value() ||
      !IsDurable(job_.shape->description.storage) || !job_.HasWholeState()) {
    return absl::OkStatus();
  }
  const Durable durable = WhatIsDurable();
  const v1::StorageSettings& storage = job_.shape->description.storage;
  // A load by which the job has begun at a step may leave the number of loads
  // as it was; its record has the digest of no commit.
  const bool has_begun = job_.record().commit_digest == 0;
  // With "every N" a commit may have been under way when the former engine
  // ended.
  const auto is_overdue = [&] {
    const uint64_t period = CommitPeriodSteps(storage);
    return job_.record().committed_step / period >
           job_.store->durable_step() / period;
  };
  const bool needs_step =
      has_begun || storage.durability() == v1::DURABILITY_KIND_STEP ||
      (storage.durability() == v1::DURABILITY_KIND_EVERY && is_overdue());
  if (durable.loads && (durable.step || !needs_step)) return absl::OkStatus();
  return MakeDurable(WaitsForCommits());
}

// An orderly end makes the last step durable, so that none is lost when the
// machine is switched off next.
void JobDurability::CommitFinally(bool loading) {
  // No tile of a prepared step is touched.
  const bool is_within_step =
      job_.recovery.has_value() && !job_.recovery->awaits_verdict;
  if (!job_.HasDisk() || !job_.failure.ok() || is_within_step ||
      !IsDurable(job_.shape->description.storage) || !job_.HasWholeState() ||
      loading) {
    return;
  }
  const auto await = [&] { return job_.store->AwaitCommit(); };
  // An error ends the store, so MakeDurable() below returns and reports it.
  job_.MakePass(await).IgnoreError();
  const Durable durable = WhatIsDurable();
  if (durable.step && durable.loads) return;
  absl::Status status = MakeDurable(WaitsForCommits());
  if (status.ok()) status = job_.MakePass(await);
  if (!status.ok()) {
    spdlog::error("step {} is not durable, {} is: {}",
                  job_.record().committed_step, job_.store->durable_step(),
                  status.ToString());
  }
}

void JobDurability::DescribeDisk(v1::DiskState* disk) const {
  const std::optional<storage::SwapState> state = job_.store->swap_state();
  if (!state.has_value()) return;
  const storage::SwapCounters& counters = state->counters;
  const storage::SwapSizes sizes = SwapSizesOf(job_, job_.shape->description);
  disk->set_io_engine(state->io_engine);
  const std::vector<std::string> devices =
      DevicesOf(job_.options.config.nvme());
  const v1::StorageSettings& storage = job_.shape->description.storage;
  std::vector<std::string> folders =
      DiskDirectoriesOf(job_.options.config, job_.options.name);
  // An open store has all of its directories.
  folders.resize(DirectoryCountOf(job_.options.config, storage));
  for (const std::string& folder : folders) {
    const auto i = static_cast<size_t>(disk->directories_size());
    const bool is_on_device = storage::MayExist(
        storage::DiskExtentPath(folder, storage.arrangement()));
    disk->add_directories(
        is_on_device ? absl::StrCat(folder, ", records on ", devices[i])
                     : folder);
  }
  disk->set_records(sizes.records);
  disk->set_frames(job_.tier->frames().size() / sizes.frame);
  disk->set_frame_bytes(sizes.frame);
  disk->set_durable_step(job_.store->durable_step());
  disk->set_commits(counters.commits);
  disk->set_records_to_write(state->records_to_write);
  disk->set_bytes_read(counters.bytes_read);
  disk->set_bytes_written(counters.bytes_written);
  disk->set_step_bytes_read(counters.last_pass.bytes_read);
  disk->set_step_bytes_written(counters.last_pass.bytes_written);
  disk->set_step_cpu_ns(counters.last_pass.cpu_ns);
  disk->set_step_ns(counters.last_pass.elapsed_ns);
  disk->set_step_waited_ns(counters.last_pass.waited_ns);
  disk->set_cpu_ns(counters.cpu_ns);
  const uint64_t bytes = counters.bytes_read + counters.bytes_written;
  if (bytes != 0) {
    // Nanoseconds a byte are seconds a GB.
    disk->set_cpu_ms_per_gb(static_cast<double>(counters.cpu_ns) * 1e3 /
                            static_cast<double>(bytes));
  }
  if (state->parameter_cache.has_value()) {
    const storage::ParameterCacheCounters& of =
        state->parameter_cache->counters;
    v1::ParameterCache* cache = disk->mutable_parameter_cache();
    cache->set_bytes(state->parameter_cache->bytes);
    cache->set_from_frames(of.from_frames);
    cache->set_hits(of.hits);
    cache->set_misses(of.misses);
    cache->set_prefetched(of.prefetched);
    cache->set_refused(of.refused);
  }
  job_.verifier.Describe(disk);
  for (const storage::DirectoryCounters& of : state->directories) {
    v1::DirectoryIo* io = disk->add_directory_io();
    io->set_bytes_read(of.bytes_read);
    io->set_bytes_written(of.bytes_written);
    io->set_reads(of.reads);
    io->set_writes(of.writes);
    io->set_syncs(of.syncs);
    io->set_errors(of.errors);
    io->set_queue_depth(of.queue_depth);
    io->set_busy_ns(of.busy_ns);
    io->set_step_bytes_read(of.last_pass.bytes_read);
    io->set_step_bytes_written(of.last_pass.bytes_written);
    io->set_step_busy_ns(of.last_pass.busy_ns);
  }
}

}  // namespace optstate::session
