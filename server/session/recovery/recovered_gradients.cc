#include "server/session/recovery/recovered_gradients.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/observe/peer_log.h"
#include "server/session/recovery/staging_file.h"
#include "spdlog/spdlog.h"

namespace optstate::session {

// Finds the gradients of ranks that are not attached: segments kept by the
// supervisor, and staging files. Only those written by the session that
// committed the step are used.
void RecoveredGradients::FindGradients() {
  for (KeptGradients& kept : job_.options.kept) {
    if (kept.rank >= ranks_.size() || kept.client_instance == 0 ||
        kept.client_instance != job_.rank_mark(kept.rank).client_instance) {
      continue;
    }
    const uint32_t rank = kept.rank;
    const absl::Status mapped = MapGradients(std::move(kept));
    if (!mapped.ok()) {
      spdlog::warn("kept gradients refused: job={} rank={} error=\"{}\"",
                   job_.options.name, rank, mapped.ToString());
    }
  }
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_.gradient_area(rank) != nullptr) continue;
    // A rank with shared memory has none.
    MapStaging(rank, job_.rank_mark(rank).client_instance).IgnoreError();
  }
}

absl::Status RecoveredGradients::MapStaging(uint32_t rank,
                                            uint64_t client_instance) {
  const uint64_t bytes = job_.shape->partitions[rank].gradient_area_bytes;
  OPTSTATE_ASSIGN_OR_RETURN(
      storage::StateFile file,
      OpenStagingFile(job_.StagingPath(rank, client_instance), bytes));
  job_.recovery->staged.push_back(std::move(file));
  ranks_.gradient_area(rank) = job_.recovery->staged.back().data();
  return absl::OkStatus();
}

void RecoveredGradients::KeepGradients(uint32_t rank) {
  const RankSession& session = ranks_.session(rank);
  if (ranks_.gradient_area(rank) != session.spec.gradient_area ||
      !job_.scheduler->NeedsGradients(rank, RecoveryUpdate())) {
    return;
  }
  const absl::Status mapped =
      session.gradient_segment == nullptr
          ? MapStaging(rank, session.spec.client_instance)
          : MapGradients(
                {.rank = rank,
                 .client_instance = session.spec.client_instance,
                 .gradient_offset_bytes = session.spec.gradient_offset_bytes,
                 .segment = UniqueFd(::fcntl(session.gradient_segment->get(),
                                             F_DUPFD_CLOEXEC, 0))});
  if (mapped.ok()) return;
  LogGradientsEnd(rank, mapped);
}

void RecoveredGradients::LogGradientsEnd(uint32_t rank,
                                         const absl::Status& why) const {
  observe::LogRepeated(
      spdlog::level::warn, "gradients end with their session",
      absl::StrCat("job ", job_.options.name),
      "gradients end with their session: job={} rank={} error=\"{}\"",
      job_.options.name, rank, why.ToString());
}

absl::Status RecoveredGradients::MapGradients(KeptGradients kept) {
  const uint32_t rank = kept.rank;
  const uint64_t offset_bytes = kept.gradient_offset_bytes;
  OPTSTATE_ASSIGN_OR_RETURN(
      shm::PeerSegment segment,
      MapKeptGradients(std::move(kept),
                       job_.shape->partitions[rank].gradient_area_bytes,
                       RecoveryGradientBytes(rank)));
  job_.recovery->kept.push_back(std::move(segment));
  ranks_.gradient_area(rank) = job_.recovery->kept.back().data() + offset_bytes;
  return absl::OkStatus();
}

// Takes the gradients of a rank that attaches. The recovery may have found the
// same ones already. Otherwise they are mapped anew, so that they outlive the
// session.
void RecoveredGradients::AdoptGradients(const AttachSpec& spec) {
  const std::byte*& area = ranks_.gradient_area(spec.rank);
  if (job_.recovery.has_value() &&
      (area != nullptr || !spec.gradients_present)) {
    return;
  }
  area = spec.gradient_area;
  if (!job_.recovery.has_value() || spec.gradient_segment < 0) return;
  const absl::Status mapped =
      MapGradients({.rank = spec.rank,
                    .client_instance = spec.client_instance,
                    .gradient_offset_bytes = spec.gradient_offset_bytes,
                    .segment = UniqueFd(
                        ::fcntl(spec.gradient_segment, F_DUPFD_CLOEXEC, 0))});
  if (!mapped.ok()) LogGradientsEnd(spec.rank, mapped);
}

scheduler::StepScheduler::Update RecoveredGradients::RecoveryUpdate() const {
  scheduler::StepScheduler::Update update;
  update.step = job_.recovery->record.committed_step;
  update.groups = job_.recovery->groups;
  update.gradient_limit = job_.recovery->gradient_limit;
  update.updated = job_.recovery->updated;
  update.pushed_by = job_.recovery->pushed_by;
  update.gradient_areas = ranks_.gradient_areas();
  return update;
}

bool RecoveredGradients::LacksGradients(uint32_t rank) const {
  return ranks_.gradient_area(rank) == nullptr &&
         job_.scheduler->NeedsGradients(rank, RecoveryUpdate());
}

// Returns how much of the rank's gradient area, from its begin, has gradients
// of the step. The rank had pushed them, so their pages were there.
uint64_t RecoveredGradients::RecoveryGradientBytes(uint32_t rank) const {
  const scheduler::StepScheduler::Update update = RecoveryUpdate();
  uint64_t bytes = 0;
  for (const Piece& piece : job_.shape->partitions[rank].pieces) {
    if (update.updated[piece.parameter] == 0 ||
        !update.HasPushed(rank, piece.parameter)) {
      continue;
    }
    const DType dtype =
        job_.layout().parameters()[piece.parameter].gradient_dtype;
    bytes = std::max(
        bytes, piece.gradient_offset_bytes + piece.numel * SizeInBytes(dtype));
  }
  return bytes;
}

// Drops the kept gradients of ranks that are away. They are not needed between
// two steps, nor for a step that is given up: ranks that return bring theirs
// again.
void RecoveredGradients::DropGradientsOfAbsent() {
  if (job_.options.keeper == nullptr) return;
  for (uint32_t rank = 0; rank < kWorldSizeMax; ++rank) {
    const bool is_attached =
        rank < ranks_.size() && ranks_.state(rank) == RankState::kAttached;
    if (!is_attached) job_.options.keeper->Drop(rank);
  }
}

// Removes stale staging files. Files of ranks that are to return are kept, for
// on a full file system they could not be made anew; another session in a
// rank's place removes the rank's file.
void RecoveredGradients::RemoveStaleStagingFiles() const {
  std::set<std::string> kept;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_.state(rank) == RankState::kAbsent) continue;
    kept.insert(job_.StagingPath(rank, job_.rank_mark(rank).client_instance));
  }
  std::error_code error;
  for (std::filesystem::directory_iterator entry(job_.options.directory, error),
       end;
       !error && entry != end; entry.increment(error)) {
    if (IsStagingFile(entry->path().filename().string()) &&
        !kept.contains(entry->path().string())) {
      ::unlink(entry->path().c_str());
    }
  }
}

}  // namespace optstate::session
