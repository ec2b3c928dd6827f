// The calls of a step.
#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/c/c_api_address.h"
#include "client/c/c_api_call.h"
#include "client/c/c_api_options.h"
#include "client/c/c_api_structs.h"
#include "client/c_api.h"
#include "client/c_api_nodes.h"
#include "client/client.h"
#include "client/session/job_position.h"
#include "proto/types/status_macros.h"

namespace client = optstate::client;

using client::CheckArrays;
using client::Guarded;

namespace {

constexpr size_t kOutcomeSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_outcome, step);

// `outcome` may be null.
absl::Status CheckOutcome(const optstate_outcome* outcome) {
  if (outcome == nullptr) return absl::OkStatus();
  return client::CheckStruct(outcome, kOutcomeSizeMin, "outcome");
}

void WriteOutcome(const client::Outcome& from, optstate_outcome* outcome) {
  if (outcome == nullptr) return;
  optstate_outcome to = {};
  to.step = from.step;
  to.applied = from.applied;
  to.found_inf = from.found_inf;
  to.gradient_norm = from.gradient_norm;
  to.clip_coefficient = from.clip_coefficient;
  to.update_ns = from.update_ns;
  to.loss_scale = from.loss_scale;
  to.durable_step = from.durable_step;
  to.prepared = from.prepared;
  to.digest = from.digest;
  client::WriteStruct(to, outcome->struct_size, outcome);
}

// A number that does not fit is none, as the daemon says.
absl::StatusOr<optstate::StepVerdict> ReadVerdict(
    const optstate_verdict* verdict) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const optstate_verdict given,
      client::ReadStruct(
          verdict, OPTSTATE_SIZE_THROUGH(optstate_verdict, clip_coefficient),
          "verdict"));
  const bool fits = given.verdict > 0 && given.verdict <= UINT8_MAX;
  return optstate::StepVerdict{
      .step = given.step,
      .digest = given.digest,
      .verdict = static_cast<optstate::Verdict>(fits ? given.verdict : 0),
      .gradient_norm = given.gradient_norm,
      .clip_coefficient = given.clip_coefficient};
}

void WritePosition(const client::JobPosition& from,
                   optstate_job_position* position) {
  optstate_job_position to = {};
  to.committed_step = from.committed_step;
  to.phase = static_cast<int32_t>(from.phase);
  to.loads_finished = from.loads_finished;
  to.durable_step = from.durable_step;
  if (from.last_outcome.has_value()) {
    to.found_inf = from.last_outcome->found_inf;
    to.digest = from.last_outcome->digest;
    to.gradient_norm = from.last_outcome->gradient_norm;
    to.clip_coefficient = from.last_outcome->clip_coefficient;
  }
  if (from.prepared.has_value()) {
    to.prepared_step = from.prepared->step;
    to.prepared_digest = from.prepared->digest;
    to.prepared_found_inf = from.prepared->found_inf;
    to.prepared_is_clipped = from.prepared_is_clipped ? 1 : 0;
    to.prepared_awaits_norm = from.prepared_awaits_norm ? 1 : 0;
    to.prepared_gradient_norm = from.prepared->gradient_norm;
    to.prepared_clip_coefficient = from.prepared->clip_coefficient;
  }
  client::WriteStruct(to, position->struct_size, position);
}

}  // namespace

extern "C" {

int optstate_push(optstate_session* session, uint64_t step, uint32_t micro_step,
                  uint32_t first, uint32_t count) {
  return Guarded(session, [&](client::Session& s) {
    return s.Push(step, micro_step, first, count);
  });
}

int optstate_push_gradients(optstate_session* session, uint64_t step,
                            uint32_t micro_step, const uint32_t* parameters,
                            const void* const* gradients, size_t count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, gradients, count));
    return s.PushGradients(step, micro_step,
                           absl::MakeConstSpan(parameters, count),
                           absl::MakeConstSpan(gradients, count));
  });
}

int optstate_flush(optstate_session* session) {
  return Guarded(session, [](client::Session& s) { return s.Flush(); });
}

int optstate_end_micro_step(optstate_session* session, uint64_t step,
                            uint32_t micro_step) {
  return Guarded(session, [=](client::Session& s) {
    return s.EndMicroStep(step, micro_step);
  });
}

int optstate_commit(optstate_session* session,
                    const optstate_commit_options* options,
                    optstate_outcome* outcome) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckOutcome(outcome));
    OPTSTATE_ASSIGN_OR_RETURN(const client::CommitOptions read,
                              client::ReadCommitOptions(options));
    OPTSTATE_ASSIGN_OR_RETURN(const client::ParameterTargets targets,
                              client::ReadCommitTargets(options));
    OPTSTATE_ASSIGN_OR_RETURN(const client::Outcome from,
                              s.Commit(read, targets));
    WriteOutcome(from, outcome);
    return absl::OkStatus();
  });
}

int optstate_commit_wait(optstate_session* session, optstate_outcome* outcome) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckOutcome(outcome));
    OPTSTATE_ASSIGN_OR_RETURN(const client::Outcome from, s.CommitWait());
    WriteOutcome(from, outcome);
    return absl::OkStatus();
  });
}

int optstate_decide(optstate_session* session, const optstate_verdict* verdict,
                    optstate_outcome* outcome) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckOutcome(outcome));
    OPTSTATE_ASSIGN_OR_RETURN(const optstate::StepVerdict decision,
                              ReadVerdict(verdict));
    OPTSTATE_ASSIGN_OR_RETURN(const client::Outcome from, s.Decide(decision));
    WriteOutcome(from, outcome);
    return absl::OkStatus();
  });
}

int optstate_find_position(const optstate_job_address* address,
                           optstate_job_position* position) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(client::CheckStruct(
        position, OPTSTATE_SIZE_THROUGH(optstate_job_position, durable_step),
        "position"));
    OPTSTATE_ASSIGN_OR_RETURN(const client::JobAddress read,
                              client::ReadJobAddress(address));
    OPTSTATE_ASSIGN_OR_RETURN(const client::JobPosition from,
                              client::FindPosition(read));
    WritePosition(from, position);
    return absl::OkStatus();
  });
}

int optstate_bring_verdict(const optstate_job_address* address,
                           const optstate_verdict* verdict,
                           optstate_outcome* outcome) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckOutcome(outcome));
    OPTSTATE_ASSIGN_OR_RETURN(const client::JobAddress read,
                              client::ReadJobAddress(address));
    OPTSTATE_ASSIGN_OR_RETURN(const optstate::StepVerdict decision,
                              ReadVerdict(verdict));
    OPTSTATE_ASSIGN_OR_RETURN(const client::Outcome from,
                              client::BringVerdict(read, decision));
    WriteOutcome(from, outcome);
    return absl::OkStatus();
  });
}

int optstate_writes_parameters(optstate_session* session, int32_t* writes) {
  return Guarded(session, [&](client::Session& s) {
    *writes = s.WritesParameters() ? 1 : 0;
    return absl::OkStatus();
  });
}

int optstate_abort(optstate_session* session, uint64_t step) {
  return Guarded(session, [&](client::Session& s) { return s.Abort(step); });
}

int optstate_read_parameters(optstate_session* session,
                             const uint32_t* parameters,
                             void* const* destinations, size_t count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, destinations, count));
    return s.ReadParameters({.parameters = {parameters, count},
                             .destinations = {destinations, count}});
  });
}

int optstate_find_changed(optstate_session* session, const uint32_t* parameters,
                          void* const* copies, size_t count, uint32_t* changed,
                          size_t* changed_count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, copies, count));
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(changed, changed_count, 1));
    std::vector<uint32_t> found;
    OPTSTATE_RETURN_IF_ERROR(s.FindChanged(
        {.parameters = {parameters, count}, .destinations = {copies, count}},
        &found));
    std::copy(found.begin(), found.end(), changed);
    *changed_count = found.size();
    return absl::OkStatus();
  });
}

int optstate_note_copies(optstate_session* session, const uint32_t* parameters,
                         size_t count) {
  return Guarded(session, [&](client::Session& s) -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(CheckArrays(parameters, parameters, count));
    return s.NoteCopies({parameters, count});
  });
}

}  // extern "C"
