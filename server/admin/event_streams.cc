#include "server/admin/event_streams.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"

namespace optstate::admin {
namespace {

// Interval of checks whether the caller has gone or the daemon ends: neither
// wakes a stream that waits for an event.
constexpr absl::Duration kLook = absl::Milliseconds(200);

}  // namespace

absl::Status EventStreams::Send(
    const v1::WatchEventsRequest& request, absl::Time deadline,
    const grpc::ServerContext* caller,
    absl::FunctionRef<bool(const v1::Event&)> pass) {
  if (!request.job().empty()) {
    OPTSTATE_RETURN_IF_ERROR(accept::CheckJobName(request.job()));
  }
  const absl::Cleanup leave = [this] { --streams_; };
  if (++streams_ > streams_max_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("you watch events ", streams_max_,
                     " times already, which is the limit: end one of these"));
  }
  return Run(request, deadline, caller, pass);
}

absl::Status EventStreams::Run(
    const v1::WatchEventsRequest& request, absl::Time deadline,
    const grpc::ServerContext* caller,
    absl::FunctionRef<bool(const v1::Event&)> pass) const {
  uint64_t seen = request.after_sequence();
  // The clock was set back before this daemon was started.
  if (seen > log_->Await(0, absl::InfinitePast())) seen = 0;
  while (true) {
    // Events that come after these two looks are passed on in the next round.
    const bool ended = ended_;
    const uint64_t last = log_->Await(0, absl::InfinitePast());
    for (const v1::Event& event : log_->After(seen, request.job())) {
      if (!pass(event)) return absl::CancelledError("the caller has gone");
      seen = event.sequence();
    }
    seen = std::max(seen, last);
    if (!request.follow()) return absl::OkStatus();
    if (ended) {
      return absl::UnavailableError(
          "the daemon ends, or another build takes its place");
    }
    if (caller != nullptr && caller->IsCancelled()) {
      return absl::CancelledError("the caller has gone");
    }
    const absl::Time now = absl::Now();
    if (now >= deadline) return absl::OkStatus();
    log_->Await(seen, std::min(deadline, now + kLook));
  }
}

}  // namespace optstate::admin
