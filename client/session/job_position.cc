#include "client/session/job_position.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/channel/channel.h"
#include "client/channel/connect.h"
#include "client/channel/handshake.h"
#include "client/channel/transport_error.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr absl::Duration kBackoffMin = absl::Milliseconds(2);
constexpr absl::Duration kBackoffMax = absl::Seconds(1);

// Asks again while no engine answers: one may be starting.
absl::StatusOr<v1::SessionReply> AskWithin(const JobAddress& address,
                                           Channel* channel,
                                           const v1::SessionRequest& request) {
  const absl::Time deadline = absl::Now() + address.timeout;
  absl::Duration backoff = kBackoffMin;
  while (true) {
    absl::StatusOr<v1::SessionReply> reply = channel->Ask(request, deadline);
    const absl::Duration left = deadline - absl::Now();
    if (reply.ok() || !IsTransportError(reply.status()) ||
        left <= absl::ZeroDuration()) {
      return reply;
    }
    absl::SleepFor(std::min(backoff, left));
    backoff = std::min(2 * backoff, kBackoffMax);
  }
}

absl::StatusOr<v1::SessionReply> Ask(const JobAddress& address,
                                     v1::SessionRequest request) {
  request.set_request_id(1);
  OPTSTATE_ASSIGN_OR_RETURN(const Endpoint endpoint,
                            FindDaemon(address.endpoint, AwayDaemon::kCounts,
                                       address.daemon_path, address.timeout));
  ChannelSetup setup;
  setup.job = address.job;
  setup.two_phase = true;
  setup.interrupted = address.interrupted;
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<Channel> channel,
                            MakeChannel(endpoint, std::move(setup)));
  absl::StatusOr<v1::SessionReply> reply =
      AskWithin(address, channel.get(), request);
  if (reply.ok()) return reply;
  return Annotate(reply.status(), absl::StrCat("job \"", address.job, "\" at ",
                                               endpoint.ToString()));
}

}  // namespace

absl::StatusOr<JobPosition> FindPosition(const JobAddress& address) {
  v1::SessionRequest request;
  request.mutable_position();
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionReply reply,
                            Ask(address, std::move(request)));
  const v1::PositionReply& from = reply.position();
  JobPosition position;
  position.committed_step = from.committed_step();
  position.phase = static_cast<JobPhase>(from.phase());
  position.loads_finished = from.loads_finished();
  position.durable_step = from.durable_step();
  if (from.has_last_outcome()) {
    position.last_outcome = FromProto(from.last_outcome());
  }
  if (from.has_prepared()) position.prepared = FromProto(from.prepared());
  position.prepared_is_clipped = from.prepared_is_clipped();
  position.prepared_awaits_norm = from.prepared_awaits_norm();
  return position;
}

absl::StatusOr<Outcome> BringVerdict(const JobAddress& address,
                                     const StepVerdict& verdict) {
  v1::SessionRequest request;
  *request.mutable_decide() = MakeDecision(verdict);
  OPTSTATE_ASSIGN_OR_RETURN(const v1::SessionReply reply,
                            Ask(address, std::move(request)));
  return FromProto(reply.outcome());
}

}  // namespace optstate::client
