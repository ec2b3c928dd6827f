#include "server/transport/fake_job.h"

#include <fcntl.h>
#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "proto/shm/sealed_segment.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/status_macros.h"
#include "server/session/recovery/staging_file.h"

namespace optstate::transport {

FakeJob::Rank FakeJob::rank(uint32_t rank) const {
  absl::MutexLock lock(&mutex_);
  return ranks_.at(rank);
}

uint64_t FakeJob::committed_step() const {
  absl::MutexLock lock(&mutex_);
  return committed_step_;
}

void FakeJob::AwaitAttached(uint32_t rank, bool attached) {
  const auto is_so = [this, rank, attached] {
    mutex_.AssertHeld();
    return rank < ranks_.size() && ranks_[rank].attached == attached;
  };
  absl::MutexLock lock(&mutex_, absl::Condition(&is_so));
}

void FakeJob::AwaitCommit(uint32_t rank) {
  const auto is_so = [this, rank] {
    mutex_.AssertHeld();
    return ranks_[rank].commit_request.has_value();
  };
  absl::MutexLock lock(&mutex_, absl::Condition(&is_so));
}

void FakeJob::AwaitEnding(uint32_t rank) {
  const auto is_so = [this, rank] {
    mutex_.AssertHeld();
    return ranks_[rank].ending_request.has_value();
  };
  absl::MutexLock lock(&mutex_, absl::Condition(&is_so));
}

absl::StatusOr<session::DeviceParameters> FakeJob::ShareParameters(
    absl::string_view device) {
  if (device != kDevice) {
    return absl::FailedPreconditionError(
        absl::StrCat("the only device is ", kDevice));
  }
  session::DeviceParameters shared;
  shared.device_index = kDeviceIndex;
  shared.memory_bytes = kDeviceBytes;
  for (UniqueFd* const file : {&shared.table, &shared.memory}) {
    OPTSTATE_ASSIGN_OR_RETURN(
        const shm::SealedSegment segment,
        shm::SealedSegment::Create("fake-device", kDeviceBytes));
    std::memset(segment.data(), 7, kDeviceBytes);
    file->reset(fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0));
  }
  return shared;
}

absl::Status FakeJob::ShareGradients(uint32_t rank, absl::string_view device,
                                     session::DeviceGradients gradients) {
  if (device != kDevice) {
    return absl::FailedPreconditionError(
        absl::StrCat("the only device is ", kDevice));
  }
  if (gradients.memory_bytes > 0) {
    for (const UniqueFd* const file : {&gradients.table, &gradients.memory}) {
      OPTSTATE_RETURN_IF_ERROR(
          shm::PeerSegment::Check(file->get(), gradients.memory_bytes));
    }
  }
  absl::MutexLock lock(&mutex_);
  ranks_.at(rank).shared_gradient_bytes = gradients.memory_bytes;
  return absl::OkStatus();
}

void FakeJob::AwaitWorkAhead(uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  const auto worked = [this, rank] {
    mutex_.AssertHeld();
    return ranks_.at(rank).worked_ahead;
  };
  mutex_.Await(absl::Condition(&worked));
}

void FakeJob::HoldPushes(bool hold) {
  absl::MutexLock lock(&mutex_);
  hold_pushes_ = hold;
}

void FakeJob::AwaitHeldPush() {
  const auto is_so = [this] {
    mutex_.AssertHeld();
    return held_pushes_ > 0;
  };
  absl::MutexLock lock(&mutex_, absl::Condition(&is_so));
}

FakeJob::FakeJob() : directory_(testing::TempDir() + "/fake_job_XXXXXX") {
  EXPECT_NE(mkdtemp(directory_.data()), nullptr);
}

FakeJob::~FakeJob() {
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

std::string FakeJob::StagingPath(uint32_t rank,
                                 uint64_t client_instance) const {
  return session::StagingFilePath(directory_, rank, client_instance);
}

absl::StatusOr<storage::StateFile> FakeJob::MakeStaging(
    uint32_t rank, uint64_t client_instance, uint64_t gradient_area_bytes,
    bool* present) {
  return session::MakeStagingFile(StagingPath(rank, client_instance),
                                  gradient_area_bytes, present);
}

absl::StatusOr<session::RegisterResult> FakeJob::Register(
    const session::RegisterSpec& spec) {
  absl::MutexLock lock(&mutex_);
  session::RegisterResult result;
  result.created = layout_ == nullptr;
  result.shape = 1;
  if (layout_ == nullptr) {
    layout_ = std::make_unique<Layout>(spec.layout);
    for (uint32_t rank = 0; rank < spec.world_size; ++rank) {
      OPTSTATE_ASSIGN_OR_RETURN(
          RankPartition partition,
          MakeRankPartition(*layout_, spec.partition, spec.world_size, rank));
      partitions_.push_back(std::move(partition));
    }
    ranks_.resize(spec.world_size);
    const uint64_t bytes =
        shm::ParameterSegmentBytes(layout_->parameter_area_bytes());
    const storage::ByteRange whole = {0, bytes};
    OPTSTATE_ASSIGN_OR_RETURN(
        parameters_,
        storage::StateFile::Create(absl::StrCat(directory_, "/parameters"),
                                   bytes, {&whole, 1}));
  }
  OPTSTATE_RETURN_IF_ERROR(layout_->CheckSame(spec.layout, false));
  result.layout_hash = layout_->hash();
  result.committed_step = committed_step_;
  result.phase = v1::JOB_PHASE_READY;
  return result;
}

absl::StatusOr<const Layout*> FakeJob::layout() const {
  absl::MutexLock lock(&mutex_);
  if (layout_ != nullptr) return layout_.get();
  return absl::FailedPreconditionError("no layout is registered");
}

absl::StatusOr<const RankPartition*> FakeJob::partition(uint32_t rank) const {
  absl::MutexLock lock(&mutex_);
  if (rank < partitions_.size()) return &partitions_[rank];
  return absl::InvalidArgumentError(absl::StrCat("no rank ", rank));
}

absl::StatusOr<UniqueFd> FakeJob::OpenParameters() const {
  absl::MutexLock lock(&mutex_);
  return UniqueFd(::open(parameters_->path().c_str(), O_RDONLY | O_CLOEXEC));
}

absl::StatusOr<session::AttachResult> FakeJob::Attach(
    const session::AttachSpec& spec) {
  absl::MutexLock lock(&mutex_);
  Rank& rank = ranks_.at(spec.rank);
  if (rank.attached) return absl::AlreadyExistsError("rank is attached");
  rank.attached = true;
  rank.attach = spec;
  rank.gradient_segment =
      spec.gradient_segment < 0
          ? nullptr
          : std::make_shared<UniqueFd>(::dup(spec.gradient_segment));
  ++rank.attaches;
  session::AttachResult result;
  result.committed_step = committed_step_;
  result.phase = v1::JOB_PHASE_READY;
  return result;
}

void FakeJob::Detach(uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  ranks_.at(rank).attached = false;
  ranks_[rank].staged.clear();
  ranks_[rank].commit_request.reset();
  ranks_[rank].ending_request.reset();
}

absl::Status FakeJob::Push(uint32_t rank, uint64_t step,
                           uint32_t /*micro_step*/, uint32_t first_parameter,
                           uint32_t parameter_count) {
  absl::MutexLock lock(&mutex_);
  ++held_pushes_;
  const auto let_go = [this] {
    mutex_.AssertHeld();
    return !hold_pushes_;
  };
  mutex_.Await(absl::Condition(&let_go));
  --held_pushes_;
  if (!ranks_.at(rank).attached) {
    return absl::InternalError("push of a rank that is not attached");
  }
  if (step != committed_step_ + 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "push of step ", step, ", but the open step is ", committed_step_ + 1));
  }
  const size_t parameters = layout_->parameters().size();
  if (first_parameter > parameters ||
      parameter_count > parameters - first_parameter) {
    return absl::InvalidArgumentError(
        absl::StrCat("push of parameters [", first_parameter, ", +",
                     parameter_count, ") of ", parameters));
  }
  const std::byte* area = ranks_[rank].attach.gradient_area;
  ranks_[rank].staged.assign(area,
                             area + partitions_[rank].gradient_area_bytes);
  ++ranks_[rank].pushes;
  return absl::OkStatus();
}

bool FakeJob::WorkAhead(uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  ranks_.at(rank).worked_ahead = true;
  return false;
}

void FakeJob::EndMicroStep(uint32_t rank, uint64_t request_id, uint64_t step,
                           uint32_t /*micro_step*/) {
  absl::MutexLock lock(&mutex_);
  if (step != committed_step_ + 1) {
    ranks_.at(rank).attach.listener->OnStepDone(
        request_id, absl::FailedPreconditionError("end out of order"), {});
    return;
  }
  ranks_.at(rank).ending_request = request_id;
  for (const Rank& other : ranks_) {
    if (!other.ending_request) return;
  }
  for (Rank& each : ranks_) {
    each.attach.listener->OnStepDone(
        *std::exchange(each.ending_request, std::nullopt), absl::OkStatus(),
        {});
  }
}

void FakeJob::Commit(uint32_t rank, uint64_t request_id,
                     const session::CommitSpec& spec) {
  absl::MutexLock lock(&mutex_);
  Rank& own = ranks_.at(rank);
  if (spec.step != committed_step_ + 1) {
    own.attach.listener->OnStepDone(
        request_id, absl::FailedPreconditionError("commit out of order"), {});
    return;
  }
  own.groups.assign(spec.groups.begin(), spec.groups.end());
  own.commit = spec;
  own.commit_request = request_id;
  for (const Rank& other : ranks_) {
    if (!other.commit_request) return;
  }
  ApplyStep();
}

void FakeJob::ApplyStep() {
  const bool found_inf =
      std::any_of(ranks_.begin(), ranks_.end(),
                  [](const Rank& rank) { return rank.commit.found_inf; });
  if (!found_inf) {
    for (uint64_t i = 0; i < parameters_->size(); ++i) {
      parameters_->data()[i] = static_cast<std::byte>(
          static_cast<uint8_t>(parameters_->data()[i]) + 1);
    }
  }
  ++committed_step_;
  session::StepOutcome outcome;
  outcome.step = committed_step_;
  outcome.applied = !found_inf;
  outcome.found_inf = found_inf;
  outcome.gradient_norm = 2.5;
  outcome.clip_coefficient = 0.5;
  outcome.update_ns = 42;
  for (Rank& rank : ranks_) {
    const uint64_t request = *std::exchange(rank.commit_request, std::nullopt);
    rank.staged.clear();
    rank.attach.listener->OnStepDone(request, absl::OkStatus(), outcome);
  }
}

absl::Status FakeJob::Abort(uint32_t rank, uint64_t step) {
  absl::MutexLock lock(&mutex_);
  if (step != committed_step_ + 1) {
    return absl::FailedPreconditionError(std::string(2000, 'x'));
  }
  ranks_.at(rank).staged.clear();
  return absl::OkStatus();
}

absl::Status FakeJob::BeginLoad(uint32_t /*rank*/) { return absl::OkStatus(); }

absl::Status FakeJob::Load(uint32_t /*rank*/, v1::StateArray array,
                           uint32_t parameter, uint64_t begin,
                           uint64_t /*numel*/, DType /*dtype*/,
                           absl::Span<const std::byte> data) {
  absl::MutexLock lock(&mutex_);
  loads_[{array, (uint64_t{parameter} << 32) + begin}].assign(data.begin(),
                                                              data.end());
  return absl::OkStatus();
}

void FakeJob::FinishLoad(uint32_t rank, uint64_t request_id,
                         const LoadEnd& end) {
  absl::MutexLock lock(&mutex_);
  last_load_end_ = end;
  ranks_.at(rank).attach.listener->OnStepDone(request_id, absl::OkStatus(), {});
}

absl::StatusOr<uint64_t> FakeJob::Fetch(v1::StateArray array,
                                        uint32_t parameter, uint64_t begin,
                                        uint64_t /*numel*/,
                                        absl::Span<std::byte> out) {
  absl::MutexLock lock(&mutex_);
  const auto load = loads_.find({array, (uint64_t{parameter} << 32) + begin});
  if (load == loads_.end()) return absl::NotFoundError("was not loaded");
  std::copy_n(load->second.begin(), std::min(load->second.size(), out.size()),
              out.begin());
  return committed_step_;
}

absl::Status FakeJob::HintParameters(session::ParameterHint hint,
                                     uint32_t first, uint32_t count) {
  absl::MutexLock lock(&mutex_);
  hints_.push_back({.hint = hint, .first = first, .count = count});
  return absl::OkStatus();
}

LoadEnd FakeJob::last_load_end() const {
  absl::MutexLock lock(&mutex_);
  return last_load_end_;
}

std::vector<FakeJob::Hint> FakeJob::hints() const {
  absl::MutexLock lock(&mutex_);
  return hints_;
}

absl::Status FakeJob::ReadParameters(uint64_t offset_bytes,
                                     absl::Span<std::byte> out) {
  absl::MutexLock lock(&mutex_);
  std::memcpy(out.data(), parameters_->data() + offset_bytes, out.size());
  return absl::OkStatus();
}

absl::Status FakeJob::AwaitDrained(absl::Time /*deadline*/) {
  return absl::OkStatus();
}

absl::Status FakeJob::AwaitResumed(absl::Time /*deadline*/) {
  return absl::OkStatus();
}

void FakeJob::Resume() {}

void FakeJob::SetLimits(const v1::Limits& /*limits*/) {}

absl::Status FakeJob::Pause(absl::Time /*deadline*/, absl::Duration /*lease*/) {
  return absl::OkStatus();
}

bool FakeJob::paused() const { return false; }

bool FakeJob::finished() const { return false; }

absl::StatusOr<v1::ListParametersReply> FakeJob::ListParameters(
    const v1::ListParametersRequest& /*request*/) const {
  return v1::ListParametersReply();
}

}  // namespace optstate::transport
