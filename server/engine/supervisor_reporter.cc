#include "server/engine/supervisor_reporter.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "proto/types/os_error.h"
#include "proto/types/partition.h"
#include "spdlog/spdlog.h"

namespace optstate::engine {

SupervisorReporter::SupervisorReporter(SupervisorLink* link) : link_(link) {}

void SupervisorReporter::Seed(const std::vector<session::KeptGradients>& kept) {
  absl::MutexLock lock(&mutex_);
  for (const session::KeptGradients& one : kept) {
    Put(one.rank, one.client_instance, one.gradient_offset_bytes,
        one.segment.get());
  }
}

bool SupervisorReporter::Put(uint32_t rank, uint64_t client_instance,
                             uint64_t gradient_offset_bytes, int segment_fd) {
  if (rank >= kWorldSizeMax) return false;
  Kept kept;
  kept.info.set_rank(rank);
  kept.info.set_client_instance(client_instance);
  kept.info.set_gradient_offset_bytes(gradient_offset_bytes);
  kept.segment.reset(::fcntl(segment_fd, F_DUPFD_CLOEXEC, 0));
  if (!kept.segment.ok()) {
    spdlog::error("gradients of rank {} would not outlive this engine: {}",
                  rank, OsError(errno, "dup of their segment").ToString());
    kept_.erase(rank);
    return true;
  }
  kept_[rank] = std::move(kept);
  return true;
}

void SupervisorReporter::Keep(uint32_t rank, uint64_t client_instance,
                              uint64_t gradient_offset_bytes, int segment_fd) {
  absl::MutexLock lock(&mutex_);
  if (!Put(rank, client_instance, gradient_offset_bytes, segment_fd)) {
    return;
  }
  unsent_ranks_.insert(rank);
  FlushLocked();
}

void SupervisorReporter::Drop(uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  if (kept_.erase(rank) == 0) return;
  unsent_ranks_.insert(rank);
  FlushLocked();
}

void SupervisorReporter::SetFinished() {
  absl::MutexLock lock(&mutex_);
  is_finished_ = true;
  unsent_finished_ = true;
  FlushLocked();
}

void SupervisorReporter::ReportAll(v1::EngineEvent::Ready ready) {
  absl::MutexLock lock(&mutex_);
  *ready_.mutable_ready() = std::move(ready);
  // Unsent drops stay queued: they may concern gradients that this supervisor
  // keeps.
  for (const auto& [rank, kept] : kept_) unsent_ranks_.insert(rank);
  unsent_ready_ = true;
  unsent_finished_ = is_finished_;
  FlushLocked();
}

void SupervisorReporter::Flush() {
  absl::MutexLock lock(&mutex_);
  FlushLocked();
}

bool SupervisorReporter::SendRank(uint32_t rank) {
  v1::EngineEvent event;
  const auto found = kept_.find(rank);
  if (found == kept_.end()) {
    event.mutable_drop_gradients()->set_rank(rank);
    return link_->Send(event);
  }
  *event.mutable_keep_gradients() = found->second.info;
  return link_->Send(event, found->second.segment.get());
}

void SupervisorReporter::FlushLocked() {
  while (!unsent_ranks_.empty()) {
    if (!SendRank(*unsent_ranks_.begin())) return;
    unsent_ranks_.erase(unsent_ranks_.begin());
  }
  if (unsent_ready_) {
    if (!link_->Send(ready_)) return;
    unsent_ready_ = false;
  }
  if (unsent_finished_) {
    v1::EngineEvent event;
    event.mutable_finished();
    unsent_finished_ = !link_->Send(event);
  }
}

}  // namespace optstate::engine
