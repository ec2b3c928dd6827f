#include "client/admin/job_sleep.h"

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_unary_call.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/admin/admin_connection.h"
#include "client/admin/sleep_call.h"
#include "client/endpoint/endpoint.h"
#include "client/endpoint/interrupt.h"
#include "optstate/v1/admin.pb.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

constexpr absl::Duration kBackoffMin = absl::Milliseconds(2);
constexpr absl::Duration kBackoffMax = absl::Seconds(1);
// The time in which the supervisor hears that ranks have left, whose gradients
// it keeps for the engine, after the engine knows.
constexpr absl::Duration kSettlingMax = absl::Seconds(2);

// One request on its way: what it has waited for, and how long.
//
// Threads: one at a time.
class Attempt {
 public:
  static absl::StatusOr<std::unique_ptr<Attempt>> Make(
      const SleepRequest& request) {
    OPTSTATE_ASSIGN_OR_RETURN(
        const Endpoint endpoint,
        ResolveEndpoint(request.endpoint, AwayDaemon::kCounts));
    AdminWords words = {.timeout = "the connection's timeout",
                        .name_another =
                            "or name another as the endpoint or in "
                            "$OPTSTATE_ENDPOINT (unix:PATH, grpc:HOST:PORT, "
                            "grpcs:HOST:PORT, grpc:unix:PATH)",
                        .when_silent = ""};
    OPTSTATE_ASSIGN_OR_RETURN(
        std::unique_ptr<AdminConnection> connection,
        AdminConnection::Make(endpoint, std::move(words), request.timeout));
    return std::unique_ptr<Attempt>(
        new Attempt(request, std::move(connection)));
  }

  // Asks how the job is; awaits a daemon that is being started.
  absl::StatusOr<v1::Job> GetJob() {
    while (true) {
      absl::StatusOr<v1::Job> job = AskOnce();
      if (!absl::IsUnavailable(job.status()) || is_over() ||
          !HadDaemon(connection_->endpoint())) {
        return job;
      }
      OPTSTATE_RETURN_IF_ERROR(Pause());
    }
  }

  // Calls `call`, and passes its progress on.
  absl::StatusOr<v1::SleepProgress> Run(absl::Status (*call)(
      AdminConnection*, const std::string&, const InterruptCheck&,
      OnSleepProgress, absl::Time)) {
    v1::SleepProgress last;
    const auto note = [&](const v1::SleepProgress& progress) {
      last = progress;
      NoteProgress();
      if (request_.progress) {
        request_.progress(progress.bytes(), progress.bytes_total());
      }
    };
    const absl::Status status =
        call(connection_.get(), request_.job, request_.interrupted, note,
             whole_deadline_);
    if (status.ok()) return last;
    if (!absl::IsUnimplemented(status)) return status;
    return absl::UnimplementedError(absl::StrCat(
        connection_->endpoint().ToString(),
        ": this daemon is older than its client, and puts no job to sleep: "
        "`optctl upgrade` puts a newer one in its place"));
  }

  // Waits until the job, which somebody else puts to sleep or wakes, may have
  // come further.
  absl::Status AwaitOthers(const v1::Job& job) {
    if (job.sleep().progress() != others_progress_) NoteProgress();
    others_progress_ = job.sleep().progress();
    if (request_.progress) request_.progress(0, 0);
    if (!is_over()) return Pause();
    return absl::DeadlineExceededError(absl::StrCat(
        connection_->endpoint().ToString(), ": ", job.sleep().progress(),
        ", by somebody else, and has come no further for ",
        absl::FormatDuration(request_.timeout)));
  }

  // Waits a little, longer each time. CANCELLED; DEADLINE_EXCEEDED: the whole
  // has taken too long.
  absl::Status Pause() {
    const absl::Time end = absl::Now() + backoff_;
    backoff_ = std::min(2 * backoff_, kBackoffMax);
    while (true) {
      OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(request_.interrupted));
      const absl::Time now = absl::Now();
      if (now >= whole_deadline_) {
        return absl::DeadlineExceededError(absl::StrCat(
            "job \"", request_.job, "\" at ",
            connection_->endpoint().ToString(), ": not done within ",
            absl::FormatDuration(request_.whole_timeout)));
      }
      if (now >= end) return absl::OkStatus();
      absl::SleepFor(std::min(end - now, kInterruptSlice));
    }
  }

  // Returns whether a refusal may still be because of ranks that have just
  // left; the time for that begins with the first call.
  bool IsSettling() {
    const absl::Time now = absl::Now();
    if (settles_at_ == absl::InfiniteFuture()) {
      settles_at_ = now + kSettlingMax;
    }
    return now < settles_at_;
  }

  // Returns whether nothing has gone on for too long.
  bool is_over() const { return absl::Now() >= silent_at_; }

 private:
  Attempt(const SleepRequest& request,
          std::unique_ptr<AdminConnection> connection)
      : request_(request),
        connection_(std::move(connection)),
        whole_deadline_(absl::Now() + request.whole_timeout) {
    NoteProgress();
  }

  void NoteProgress() {
    silent_at_ = absl::Now() + request_.timeout;
    backoff_ = kBackoffMin;
  }

  absl::StatusOr<v1::Job> AskOnce() {
    const absl::Time deadline =
        std::min(whole_deadline_, absl::Now() + request_.timeout);
    OPTSTATE_RETURN_IF_ERROR(
        connection_->Await(deadline, request_.interrupted));
    v1::GetJobRequest ask;
    ask.set_name(request_.job);
    v1::Job job;
    grpc::Status status;
    grpc::ClientContext context;
    connection_->SayWhoCalls(&context);
    context.set_deadline(absl::ToChronoTime(deadline));
    grpc::CompletionQueue queue;
    const auto call = connection_->stub()->AsyncGetJob(&context, ask, &queue);
    call->Finish(&job, &status, nullptr);
    void* tag;
    bool ok;
    // The context's deadline ends this.
    while (queue.AsyncNext(&tag, &ok,
                           absl::ToChronoTime(absl::Now() + kInterruptSlice)) ==
           grpc::CompletionQueue::TIMEOUT) {
      const absl::Status goes_on = CheckInterrupted(request_.interrupted);
      if (goes_on.ok()) continue;
      context.TryCancel();
      queue.Next(&tag, &ok);
      return goes_on;
    }
    if (status.ok()) return job;
    return connection_->Explain(status);
  }

  const SleepRequest& request_;
  const std::unique_ptr<AdminConnection> connection_;
  const absl::Time whole_deadline_;
  absl::Time silent_at_;
  absl::Time settles_at_ =
      absl::InfiniteFuture();  // infinite: none was refused
  absl::Duration backoff_ = kBackoffMin;
  std::string others_progress_;
};

bool IsOnItsWay(const v1::Job& job) { return !job.sleep().progress().empty(); }

// Returns whether a job that cannot be put to sleep now may be ready for it in
// a moment: the engine notices the end of a session a little after it, and a
// daemon that was started again finds its engines.
bool MayBeIdleSoon(const v1::Job& job) {
  if (job.phase() == v1::JOB_PHASE_FAILED) return false;
  return job.session_count() != 0 || job.engine_pid() == 0 ||
         job.ranks_unknown();
}

// Returns whether a call was perhaps refused because somebody else was faster.
bool MayBeSomebodyElse(const absl::Status& refused) {
  return absl::IsUnavailable(refused) || absl::IsFailedPrecondition(refused);
}

JobMark MarkOf(const v1::Job& job) {
  JobMark mark;
  // Without the facts of its files the step is not known either.
  if (job.state_unknown() || !job.has_created_at()) return mark;
  mark.created_at_ns =
      static_cast<uint64_t>(job.created_at().seconds()) * 1'000'000'000 +
      static_cast<uint64_t>(job.created_at().nanos());
  mark.committed_step = job.committed_step();
  return mark;
}

JobSleep Done(const v1::Job& job, const v1::SleepProgress& last) {
  return {.directory = last.directory(),
          .memory_bytes = last.memory_bytes(),
          .was_so = false,
          .mark = MarkOf(job)};
}

JobSleep WasSo(const v1::Job& job) {
  return {.directory = job.sleep().directory(),
          .memory_bytes = job.sleep().memory_bytes(),
          .was_so = true,
          .mark = MarkOf(job)};
}

absl::Status CheckMark(const v1::Job& job, const JobMark& expected) {
  const JobMark found = MarkOf(job);
  if (expected.created_at_ns == 0 || found.created_at_ns == 0) {
    return absl::OkStatus();
  }
  if (found.created_at_ns != expected.created_at_ns) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job \"", job.name(),
        "\" is another one than was put to sleep: that was deleted, and this "
        "one made under its name"));
  }
  if (found.committed_step == expected.committed_step) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job \"", job.name(), "\" was put to sleep at step ",
      expected.committed_step, " and is at step ", found.committed_step,
      ": somebody has woken it, and it has gone on since"));
}

}  // namespace

absl::StatusOr<JobSleep> PutJobToSleep(const SleepRequest& request) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<Attempt> attempt,
                            Attempt::Make(request));
  while (true) {
    OPTSTATE_ASSIGN_OR_RETURN(const v1::Job job, attempt->GetJob());
    if (IsOnItsWay(job)) {
      OPTSTATE_RETURN_IF_ERROR(attempt->AwaitOthers(job));
      continue;
    }
    if (job.has_sleep()) return WasSo(job);
    if (MayBeIdleSoon(job) && !attempt->is_over()) {
      OPTSTATE_RETURN_IF_ERROR(attempt->Pause());
      continue;
    }
    const absl::StatusOr<v1::SleepProgress> last = attempt->Run(&CallSleepJob);
    if (last.ok()) return Done(job, *last);
    if (!MayBeSomebodyElse(last.status())) return last.status();
    OPTSTATE_ASSIGN_OR_RETURN(const v1::Job now, attempt->GetJob());
    if (now.has_sleep()) continue;
    const bool goes_on = absl::IsUnavailable(last.status())
                             ? !attempt->is_over()
                             : attempt->IsSettling();
    if (!goes_on) return last.status();
    OPTSTATE_RETURN_IF_ERROR(attempt->Pause());
  }
}

absl::StatusOr<JobSleep> WakeJob(const SleepRequest& request,
                                 const JobMark& expected) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<Attempt> attempt,
                            Attempt::Make(request));
  while (true) {
    OPTSTATE_ASSIGN_OR_RETURN(const v1::Job job, attempt->GetJob());
    if (IsOnItsWay(job)) {
      OPTSTATE_RETURN_IF_ERROR(attempt->AwaitOthers(job));
      continue;
    }
    OPTSTATE_RETURN_IF_ERROR(CheckMark(job, expected));
    if (!job.has_sleep()) return WasSo(job);
    const absl::StatusOr<v1::SleepProgress> last = attempt->Run(&CallWakeJob);
    if (last.ok()) return Done(job, *last);
    if (!MayBeSomebodyElse(last.status())) return last.status();
    OPTSTATE_ASSIGN_OR_RETURN(const v1::Job now, attempt->GetJob());
    if (!now.has_sleep() || IsOnItsWay(now)) continue;
    if (!absl::IsUnavailable(last.status()) || attempt->is_over()) {
      return last.status();
    }
    OPTSTATE_RETURN_IF_ERROR(attempt->Pause());
  }
}

}  // namespace optstate::client
