// The recovery of a session after a lost connection.

#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/channel/channel.h"
#include "client/channel/transport_error.h"
#include "client/client.h"
#include "client/endpoint/endpoint.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr absl::Duration kBackoffMin = absl::Milliseconds(2);
constexpr absl::Duration kBackoffMax = absl::Seconds(1);
constexpr absl::Duration kLeaveTimeout = absl::Seconds(5);

}  // namespace

absl::Status Session::CheckUsable() const {
  if (getpid() != owner_pid_) {
    return absl::FailedPreconditionError(
        absl::StrCat("the session belongs to process ", owner_pid_,
                     "; a forked process opens its own"));
  }
  if (closed_) return absl::FailedPreconditionError("the session is closed");
  return absl::OkStatus();
}

absl::Status Session::Ready() {
  OPTSTATE_RETURN_IF_ERROR(CheckUsable());
  return channel_->connected() ? absl::OkStatus() : Recover();
}

absl::Status Session::Persist(absl::FunctionRef<absl::Status()> verb) {
  while (true) {
    absl::Status status = Ready();
    if (status.ok()) status = verb();
    if (!IsTransportError(status)) return status;
  }
}

// Reconnects in three steps.
// 1. Connects, registers and attaches again, with the same gradient area.
// 2. Compares the job's committed step with ours. One more: the step whose
//    commit was under way is applied, and committing it again returns the
//    recorded outcome. Equal: the engine has dropped our staged gradients,
//    except accumulated ones that it reports.
// 3. Pushes the rest again, if its gradients are still in the gradient area.
absl::Status Session::Recover() {
  Attached attached;
  OPTSTATE_RETURN_IF_ERROR(ConnectWithin(Attempt::kAgain, &attached));
  OPTSTATE_RETURN_IF_ERROR(CheckSameJob(attached));
  phase_ = attached.phase;
  channel_->ClearFailedPush();
  commit_sent_ = false;
  end_sent_.reset();
  settled_step_ = 0;  // another engine
  takes_begin_at_ = attached.takes_begin_at;
  const std::optional<uint32_t> loads_before =
      std::exchange(loads_finished_, attached.loads_finished);
  if (std::exchange(loading_, false)) {
    // Then only this rank's answer was lost.
    if (IsLoadFinished(attached, loads_before)) return absl::OkStatus();
    return absl::AbortedError(
        "the connection was lost while state was loaded; begin the load again");
  }
  if (attached.committed_step == committed_step_) {
    return PushAgain(attached);
  }
  // Without a commit under way, the new step's caller gave up at the deadline.
  if (!commit_) committed_step_ = attached.committed_step;
  return absl::OkStatus();
}

bool Session::IsLoadFinished(const Attached& attached,
                             std::optional<uint32_t> loads_before) const {
  if (!finishing_load_) return false;
  if (begin_at_) {
    return phase_ == JobPhase::kReady &&
           attached.committed_step == begin_at_->step &&
           loads_finished_ == begin_at_->loads_finished;
  }
  return loads_finished_ ? loads_finished_ != loads_before
                         : phase_ == JobPhase::kReady;
}

// Connects until the timeout. On the first attempt, an endpoint where no daemon
// has ever listened is the caller's mistake; otherwise a daemon is being
// restarted there. Later, ALREADY_EXISTS means that the engine has not yet
// noticed the end of our own last connection.
absl::Status Session::ConnectWithin(Attempt attempt, Attached* attached) {
  const bool first = attempt == Attempt::kFirst;
  const absl::Time deadline = absl::Now() + options_.connect_timeout;
  const absl::StatusOr<Endpoint> endpoint = ParseEndpoint(options_.endpoint);
  const auto may_come_back = [&endpoint](const absl::Status& status) {
    return endpoint.ok() && !absl::IsPermissionDenied(status) &&
           HadDaemon(*endpoint);
  };
  absl::Duration backoff = kBackoffMin;
  absl::Status cause;
  while (true) {
    // A job that is gone must not be created again.
    absl::StatusOr<Attached> result =
        channel_->Connect(/*must_exist=*/!first, deadline);
    if (result.ok()) {
      ++connections_;
      *attached = *std::move(result);
      return absl::OkStatus();
    }
    const absl::Status& status = result.status();
    const bool again =
        first ? IsTransportError(status) &&
                    (!IsUnreachable(status) || may_come_back(status))
              : IsTransportError(status) || absl::IsAlreadyExists(status);
    if (!again) return status;
    const absl::Duration left = deadline - absl::Now();
    // The last attempt had no time for an answer.
    if (cause.ok() || !absl::IsDeadlineExceeded(status)) cause = status;
    if (left <= absl::ZeroDuration()) {
      return Annotate(
          cause, absl::StrCat("the daemon was not reached within ",
                              absl::FormatDuration(options_.connect_timeout)));
    }
    absl::SleepFor(std::min(backoff, left));
    backoff = std::min(2 * backoff, kBackoffMax);
  }
}

// Tells the engine that this rank leaves. An engine that died could not be
// told, so the next engine is told, which would otherwise await us. An engine
// that only does not answer has the message in its socket and reads it unless
// it dies first: then we are awaited until this process ends.
void Session::Leave() {
  if (!attached_) return;
  absl::Status told = channel_->Disconnect();
  const absl::Time deadline = absl::Now() + kLeaveTimeout;
  absl::Duration backoff = kBackoffMin;
  while (IsTransportError(told) && !IsUnreachable(told) &&
         !absl::IsDeadlineExceeded(told) && absl::Now() < deadline) {
    told = channel_->Farewell(deadline);
    if (IsTransportError(told)) absl::SleepFor(backoff);
    backoff = std::min(2 * backoff, kBackoffMax);
  }
}

absl::Status Session::CheckSameJob(const Attached& attached) const {
  if (attached.committed_step == committed_step_ ||
      attached.committed_step == committed_step_ + 1 ||
      (begin_at_ && attached.committed_step == begin_at_->step)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the job is at step ", attached.committed_step,
                   " after the connection "
                   "was lost, this session is at step ",
                   committed_step_, "; open a new session"));
}

absl::Status Session::PushAgain(const Attached& attached) {
  const uint64_t step = committed_step_ + 1;
  std::vector<int64_t> there(marks_.size(), kNone);
  for (const StagedPieces& pieces : attached.staged) {
    std::fill_n(there.begin() + pieces.first, pieces.count, pieces.micro_step);
  }
  const auto missing = [&](size_t i) {
    return marks_[i].step == step && there[i] < marks_[i].micro_step;
  };
  const auto& pieces = setup_->partition.pieces;
  for (size_t i = 0; i < marks_.size(); ++i) {
    // A piece without elements can neither be lost nor be missing.
    if (!missing(i) || pieces[i].numel == 0) continue;
    const bool has_bytes = !marks_[i].is_released || attached.gradients_present;
    if (has_bytes && there[i] >= marks_[i].micro_step_before &&
        marks_[i].ended == ended_) {
      continue;
    }
    ForgetStaged();
    return absl::AbortedError(
        absl::StrCat(has_bytes ? "accumulated gradients" : "gradients",
                     " of step ", step, " were lost; run the step again"));
  }
  // Micro-steps are pushed in order: a push tells that the ones before it are
  // over.
  std::set<int64_t> micro_steps;
  for (size_t i = 0; i < marks_.size(); ++i) {
    if (missing(i)) micro_steps.insert(marks_[i].micro_step);
  }
  for (const int64_t micro_step : micro_steps) {
    OPTSTATE_RETURN_IF_ERROR(
        PushMicroStepAgain(step, micro_step, [&](size_t i) {
          return missing(i) && marks_[i].micro_step == micro_step;
        }));
  }
  return absl::OkStatus();
}

absl::Status Session::PushMicroStepAgain(
    uint64_t step, int64_t micro_step,
    absl::FunctionRef<bool(size_t piece)> pushes) {
  const auto& pieces = setup_->partition.pieces;
  for (size_t i = 0; i < pieces.size();) {
    if (!pushes(i)) {
      ++i;
      continue;
    }
    size_t end = i + 1;
    const bool is_there = marks_[i].is_released;
    while (end < pieces.size() && pushes(end) &&
           marks_[end].is_released == is_there) {
      ++end;
    }
    const uint32_t first = pieces[i].parameter;
    OPTSTATE_RETURN_IF_ERROR(channel_->Push(
        {.step = step,
         .micro_step = static_cast<uint32_t>(micro_step),
         .first_parameter = first,
         .parameter_count = pieces[end - 1].parameter - first + 1,
         .is_there = is_there},
        StepDeadline()));
    i = end;
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
