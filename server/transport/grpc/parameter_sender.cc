#include "server/transport/grpc/parameter_sender.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/status_macros.h"

namespace optstate::transport {
namespace {

// The pause between two looks at the stamps: a worker's part takes about the
// shortest; while other ranks are awaited nothing changes.
constexpr absl::Duration kPauseMin = absl::Microseconds(100);
constexpr absl::Duration kPauseMax = absl::Milliseconds(2);
// With hundreds of thousands of parts a look takes a while itself.
constexpr int kPauseOfALook = 20;

}  // namespace

absl::Status ParameterSender::Open(UniqueFd parameters,
                                   uint64_t parameter_area_bytes,
                                   UniqueFd run_stamps, uint64_t run_count,
                                   std::vector<AreaPart> parts) {
  OPTSTATE_ASSIGN_OR_RETURN(
      parameters_, shm::PeerSegment::MapFile(
                       std::move(parameters),
                       shm::ParameterSegmentBytes(parameter_area_bytes)));
  run_stamps_.reset();
  if (run_stamps.ok()) {
    OPTSTATE_ASSIGN_OR_RETURN(
        run_stamps_, shm::PeerSegment::MapFile(std::move(run_stamps),
                                               shm::RunStampsBytes(run_count)));
  }
  parts_ = std::move(parts);
  left_.reserve(parts_.size());
  return absl::OkStatus();
}

void ParameterSender::Begin(uint64_t request_id, uint64_t step) {
  absl::MutexLock lock(&mutex_);
  next_ = {.request_id = request_id, .step = step};
}

const ParameterSender::Commit* ParameterSender::Awaited() {
  if (awaited_) return &*awaited_;
  absl::MutexLock lock(&mutex_);
  if (!next_) return nullptr;
  awaited_ = std::exchange(next_, std::nullopt);
  left_.resize(parts_.size());
  std::iota(left_.begin(), left_.end(), size_t{0});
  pause_ = kPauseMin;
  return &*awaited_;
}

absl::Time ParameterSender::NextLook() {
  if (Awaited() == nullptr || !run_stamps_ || left_.empty()) {
    return absl::InfiniteFuture();
  }
  return absl::Now() + pause_;
}

bool ParameterSender::SendReady(Write write) {
  if (Awaited() == nullptr || !run_stamps_) return true;
  const size_t before = left_.size();
  const absl::Time begin = absl::Now();
  bool is_there = true;
  const auto sent = [&](size_t part) {
    if (!is_there || !IsReady(parts_[part])) return false;
    is_there = Send(parts_[part], write);
    return true;
  };
  left_.erase(std::remove_if(left_.begin(), left_.end(), sent), left_.end());
  if (left_.size() == before) {
    const absl::Duration looked = absl::Now() - begin;
    pause_ = std::max(std::min(2 * pause_, kPauseMax), kPauseOfALook * looked);
  } else {
    pause_ = kPauseMin;
  }
  return is_there;
}

bool ParameterSender::SendRest(v1::SessionReply* reply, Write write) {
  if (Awaited() == nullptr || reply->request_id() != awaited_->request_id) {
    return true;
  }
  bool is_there = true;
  if (reply->has_outcome() && reply->outcome().applied()) {
    for (size_t i = 0; i < left_.size() && is_there; ++i) {
      is_there = Send(parts_[left_[i]], write);
    }
    reply->set_has_parameters(true);
  }
  awaited_.reset();
  return is_there;
}

bool ParameterSender::IsReady(const AreaPart& part) const {
  const auto* const stamps =
      reinterpret_cast<const std::atomic<uint64_t>*>(run_stamps_->data());
  // The last run is checked first: it is mostly the last to be stamped.
  for (uint64_t run = part.end_run; run > part.first_run; --run) {
    const uint64_t step = stamps[run - 1].load(std::memory_order_acquire);
    if (step != awaited_->step) return false;
  }
  return true;
}

bool ParameterSender::Send(const AreaPart& part, Write write) {
  chunk_.set_request_id(awaited_->request_id);
  chunk_.mutable_status();
  v1::ParameterChunk& chunk = *chunk_.mutable_parameter_chunk();
  chunk.set_offset_bytes(part.begin);
  chunk.mutable_data()->assign(
      reinterpret_cast<const char*>(parameters_.data()) + part.begin,
      part.end - part.begin);
  if (counts_ != nullptr) counts_->AddSent(part.end - part.begin);
  return write(chunk_);
}

}  // namespace optstate::transport
