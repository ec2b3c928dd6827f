#include "server/session/job_describer.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"
#include "server/session/devices/device_updates.h"
#include "server/session/durability/rearrangement.h"
#include "server/session/job_facts.h"
#include "server/session/wire_counters.h"

namespace optstate::session {
namespace {

constexpr uint32_t kPageMax = 10000;
// Names may be long, and clients accept 4 MiB by default.
constexpr size_t kPageBytes = size_t{2} << 20;

}  // namespace

v1::Job JobDescriber::Describe() const {
  v1::Job job;
  job.set_name(job_.options.name);
  job.set_uid(job_.options.uid);
  job.set_phase(job_.phase());
  job.set_engine_pid(::getpid());
  job.set_state_dir(job_.options.directory);
  if (!job_.failure.ok()) job.set_reason(std::string(job_.failure.message()));
  // A job that no rank has registered yet may have refused some.
  if (job_.options.wires != nullptr) job_.options.wires->Describe(&job);
  if (job_.shape == nullptr) return job;
  DescribeState(&job);
  DescribeSessions(&job);
  return job;
}

void JobDescriber::DescribeState(v1::Job* job) const {
  AddDescription(job_.shape->description, job);
  AddRecord(job_.record(), job);
  step_.timer.Describe(job);
  speculator_.Describe(job);
  job->set_skipped_steps(committer_.skipped_steps());
  job->set_recovered_steps(job_.tier->control()->steps_recovered);
  job->set_rolled_back_runs(job_.tier->control()->runs_rolled_back);
  SetTimestamp(job_.tier->control()->created_at_ns, job->mutable_created_at());
  job->set_state_bytes(job_.tier->bytes());
  for (const storage::HostTier::ArrayInfo& info :
       job_.tier->Describe(job_.layout())) {
    v1::ArrayBytes* array = job->add_arrays();
    array->set_name(info.name);
    array->set_dtype(info.dtype);
    array->set_bytes(info.bytes);
    array->set_file(info.file);
  }
  state_lock_.Describe(job->mutable_memory_lock());
  if (job_.HasDisk()) durability_.DescribeDisk(job->mutable_disk());
  DescribeDeviceUpdates(job_, job);
  job->set_open_step(DescribeOpenStep());
  DescribeRewrite(job_, job);
  if (load_.round.active() && job->open_load().empty()) {
    job->set_open_load(absl::StrCat(load_.round.Describe(), ", ",
                                    load_.staged.bytes(), " bytes staged"));
  }
}

// A step that the store failed to apply is open no more: the job is FAILED.
std::string JobDescriber::DescribeOpenStep() const {
  if (job_.recovery.has_value() && job_.recovery->awaits_verdict) {
    return absl::StrCat("step ", job_.recovery->record.committed_step,
                        ": prepared; waiting for all nodes' decision");
  }
  if (job_.recovery.has_value()) {
    return absl::StrCat("step ", job_.recovery->record.committed_step,
                        ": the engine died in it; waiting for ranks that have "
                        "its gradients");
  }
  const StepPhase phase = step_.progress.phase();
  const uint64_t committed = job_.record().committed_step;
  switch (phase) {
    case StepPhase::kNone:
      return "";
    case StepPhase::kOpen:
      return absl::StrCat("step ", committed + 1, ": ",
                          step_.open_step.Describe());
    case StepPhase::kApplying:
      if (!job_.failure.ok()) return "";
      [[fallthrough]];
    case StepPhase::kDecided:
    case StepPhase::kPrepared:
      return absl::StrCat("step ", committed + 1, ": ", NameOf(phase));
    case StepPhase::kRecorded:
      return absl::StrCat("step ", committed, ": ", NameOf(phase));
  }
  return "";
}

void JobDescriber::DescribeSessions(v1::Job* job) const {
  job->set_session_count(ranks_.AttachedCount());
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_.state(rank) != RankState::kAttached) continue;
    const RankSession& session = ranks_.session(rank);
    v1::SessionInfo* info = job->add_sessions();
    info->set_job(job_.options.name);
    info->set_rank(rank);
    info->set_pid(session.spec.pid);
    info->set_uid(session.spec.uid);
    info->set_wire(session.spec.wire);
    info->set_client_version(session.spec.client_version);
    SetTimestamp(absl::ToUnixNanos(session.attached_at),
                 info->mutable_attached_at());
    info->set_committed_step(session.committed_step);
    info->set_staged_parameters(step_.open_step.staged_by(rank));
    info->set_gradient_bytes(job_.shape->partitions[rank].gradient_area_bytes);
    info->set_attached(true);
  }
}

absl::StatusOr<v1::ListParametersReply> JobDescriber::ListParameters(
    const v1::ListParametersRequest& request) const {
  OPTSTATE_RETURN_IF_ERROR(job_.CheckRegistered());
  uint32_t first = 0;
  if (!request.page_token().empty() &&
      (!absl::SimpleAtoi(request.page_token(), &first) ||
       absl::StrCat(first) != request.page_token() ||
       first > job_.parameter_count())) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_token \"", request.page_token(),
                     "\" is not one that a reply gave"));
  }
  const uint32_t page_size = request.page_size() == 0
                                 ? kPageMax
                                 : std::min(request.page_size(), kPageMax);
  const uint32_t end = static_cast<uint32_t>(
      std::min<uint64_t>(uint64_t{first} + page_size, job_.parameter_count()));
  const absl::Span<const int64_t> counts = job_.StepCounts();
  v1::ListParametersReply reply;
  uint32_t p = first;
  for (size_t bytes = 0; p < end && bytes < kPageBytes; ++p) {
    v1::ParameterInfo* info = reply.add_parameters();
    info->set_index(p);
    *info->mutable_parameter() = ToProto(job_.layout().parameters()[p]);
    const auto pieces = job_.scheduler->pieces().pieces(p);
    info->set_owner_rank(pieces.front().rank);
    info->set_piece_count(static_cast<uint32_t>(pieces.size()));
    info->set_step_count(counts[p]);
    info->set_staged(step_.open_step.staged_pieces(p) > 0);
    bytes += info->ByteSizeLong();
  }
  if (p < job_.parameter_count()) reply.set_next_page_token(absl::StrCat(p));
  return reply;
}

}  // namespace optstate::session
