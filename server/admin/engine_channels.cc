#include "server/admin/engine_channels.h"

#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "optstate/v1/engine.grpc.pb.h"
#include "proto/types/grpc_status.h"
#include "proto/types/status_macros.h"

namespace optstate::admin {
namespace {

// An engine's drain ends this much before this side's deadline, so that its
// answer, which names the cause of the wait, arrives in time.
constexpr absl::Duration kDrainAnswerTime = absl::Milliseconds(200);
// Grace beyond an engine's own deadline, for an engine that is busy.
constexpr absl::Duration kPauseAnswerTime = absl::Seconds(1);
// Interval at which paused engines are asked again, before they would go on.
constexpr absl::Duration kPauseAgain = absl::Seconds(1);
// Interval at which a wait checks whether its call was cancelled.
constexpr absl::Duration kLook = absl::Milliseconds(100);

absl::Status NoEngine(const std::string& job) {
  return absl::UnavailableError(
      absl::StrCat("the engine of job \"", job, "\" is not running"));
}

// Sets up a call that does not wait for its connection: a private connection
// either works or its engine is gone.
void SetUp(grpc::ClientContext* context, absl::Time deadline) {
  context->set_deadline(absl::ToChronoTime(deadline));
  context->set_wait_for_ready(false);
}

bool IsCancelled(const grpc::ServerContext* caller) {
  return caller != nullptr && caller->IsCancelled();
}

// Makes a context that is cancelled with `caller`, unless that is null.
std::unique_ptr<grpc::ClientContext> MakeContext(
    absl::Time deadline, const grpc::ServerContext* caller) {
  auto context = caller != nullptr
                     ? grpc::ClientContext::FromServerContext(*caller)
                     : std::make_unique<grpc::ClientContext>();
  SetUp(context.get(), deadline);
  return context;
}

// Sets the time that the engine may wait.
void SetTimeout(absl::Time end, google::protobuf::Duration* to) {
  const absl::Duration timeout =
      std::max(end - absl::Now(), absl::ZeroDuration());
  to->set_seconds(absl::ToInt64Seconds(timeout));
  to->set_nanos(static_cast<int32_t>(
      absl::ToInt64Nanoseconds(timeout % absl::Seconds(1))));
}

v1::DrainRequest MakeDrain(bool resume, absl::Time deadline) {
  v1::DrainRequest request;
  request.set_resume(resume);
  SetTimeout(deadline - kDrainAnswerTime, request.mutable_timeout());
  return request;
}

absl::Status Named(const std::string& job, const grpc::Status& status) {
  return Annotate(FromGrpc(status),
                  absl::StrCat("engine of job \"", job, "\""));
}

}  // namespace

struct EngineChannels::Channel {
  std::unique_ptr<v1::Engine::Stub> stub;
};

EngineChannels::EngineChannels() = default;
EngineChannels::~EngineChannels() = default;

void EngineChannels::Set(const std::string& job, UniqueFd grpc) {
  grpc::ChannelArguments arguments;
  // A page of 10,000 parameters is larger than gRPC's default of 4 MiB.
  arguments.SetMaxReceiveMessageSize(-1);
  auto channel = std::make_shared<Channel>();
  channel->stub = v1::Engine::NewStub(grpc::CreateCustomInsecureChannelFromFd(
      "engine", grpc.release(), arguments));
  absl::MutexLock lock(&mutex_);
  channels_[job] = std::move(channel);
}

void EngineChannels::Lose(const std::string& job) {
  std::shared_ptr<Channel> last;  // destroyed outside the lock
  absl::MutexLock lock(&mutex_);
  last = std::exchange(channels_[job], nullptr);
}

void EngineChannels::Erase(const std::string& job) {
  std::shared_ptr<Channel> last;  // destroyed outside the lock
  absl::MutexLock lock(&mutex_);
  const auto found = channels_.find(job);
  if (found == channels_.end()) return;
  last = std::move(found->second);
  channels_.erase(found);
}

std::shared_ptr<EngineChannels::Channel> EngineChannels::Find(
    const std::string& job) const {
  absl::MutexLock lock(&mutex_);
  const auto found = channels_.find(job);
  return found == channels_.end() ? nullptr : found->second;
}

absl::StatusOr<v1::Job> EngineChannels::GetJob(const std::string& job,
                                               absl::Time deadline,
                                               bool memory) {
  return std::move(GetJobs({job}, deadline, memory)[0]);
}

absl::StatusOr<v1::ListParametersReply> EngineChannels::ListParameters(
    const Engine& engine, const v1::ListParametersRequest& request,
    absl::Time deadline) {
  if (engine == nullptr) return NoEngine(request.job());
  grpc::ClientContext context;
  SetUp(&context, deadline);
  v1::ListParametersReply reply;
  const grpc::Status status =
      engine->stub->ListParameters(&context, request, &reply);
  // The engine gave no answer.
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return Named(request.job(), status);
  }
  // The error is not annotated: it concerns the request.
  if (!status.ok()) return FromGrpc(status);
  return reply;
}

struct EngineChannels::Call {
  size_t position = 0;  // among the calls made
  std::string job;
  std::shared_ptr<Channel> channel;
  std::unique_ptr<grpc::ClientContext> context;
  v1::GetJobRequest get_request;
  v1::Job get_reply;
  v1::RestReply pause_reply;
  v1::DrainReply drain_reply;
  absl::Status status;
};

std::vector<std::unique_ptr<EngineChannels::Call>> EngineChannels::MakeCalls(
    absl::Time deadline, const grpc::ServerContext* caller) const {
  std::vector<std::unique_ptr<Call>> calls;
  absl::MutexLock lock(&mutex_);
  for (const auto& [job, channel] : channels_) {
    calls.push_back(std::make_unique<Call>());
    calls.back()->job = job;
    calls.back()->channel = channel;
    calls.back()->context = MakeContext(deadline, caller);
  }
  return calls;
}

void EngineChannels::AskAll(const std::vector<std::unique_ptr<Call>>& calls,
                            absl::FunctionRef<void(Call*, OnAnswer)> ask) {
  absl::BlockingCounter pending(static_cast<int>(calls.size()));
  for (const auto& call : calls) {
    if (call->channel == nullptr) {
      call->status = NoEngine(call->job);
      pending.DecrementCount();
      continue;
    }
    ask(call.get(), [raw = call.get(), &pending](const grpc::Status& status) {
      raw->status = Named(raw->job, status);
      pending.DecrementCount();
    });
  }
  pending.Wait();
}

std::vector<std::unique_ptr<EngineChannels::Call>> EngineChannels::MakeCalls(
    const std::vector<std::string>& jobs, absl::Time deadline) const {
  std::vector<std::unique_ptr<Call>> calls;
  for (const std::string& job : jobs) {
    calls.push_back(std::make_unique<Call>());
    calls.back()->position = calls.size() - 1;
    calls.back()->job = job;
    calls.back()->channel = Find(job);
    calls.back()->context = MakeContext(deadline, nullptr);
  }
  return calls;
}

void EngineChannels::AskForJobs(const std::vector<std::unique_ptr<Call>>& calls,
                                bool memory) {
  for (const auto& call : calls) {
    call->get_request.set_name(call->job);
    call->get_request.set_memory(memory);
  }
  // A thread that awaits one answer reads it itself, instead of having one of
  // gRPC's wake it.
  if (calls.size() == 1 && calls[0]->channel != nullptr) {
    Call& call = *calls[0];
    call.status = Named(
        call.job, call.channel->stub->GetJob(
                      call.context.get(), call.get_request, &call.get_reply));
    return;
  }
  AskAll(calls, [](Call* call, OnAnswer on_answer) {
    call->channel->stub->async()->GetJob(call->context.get(),
                                         &call->get_request, &call->get_reply,
                                         std::move(on_answer));
  });
}

std::vector<absl::StatusOr<v1::Job>> EngineChannels::AnswersOf(
    const std::vector<std::unique_ptr<Call>>& calls) {
  std::vector<absl::StatusOr<v1::Job>> results;
  for (const auto& call : calls) {
    if (call->status.ok()) {
      results.emplace_back(std::move(call->get_reply));
    } else {
      results.emplace_back(std::move(call->status));
    }
  }
  return results;
}

std::vector<absl::StatusOr<v1::Job>> EngineChannels::GetJobs(
    const std::vector<std::string>& jobs, absl::Time deadline, bool memory) {
  const auto calls = MakeCalls(jobs, deadline);
  AskForJobs(calls, memory);
  return AnswersOf(calls);
}

std::vector<absl::StatusOr<v1::Job>> EngineChannels::AwaitJobs(
    const std::vector<std::string>& jobs, absl::Time deadline) {
  auto calls = MakeCalls(jobs, deadline);
  AskForJobs(calls, /*memory=*/false);
  while (true) {
    auto next = AwaitNextCalls(calls, deadline);
    if (next.empty()) return AnswersOf(calls);
    AskForJobs(next, /*memory=*/false);
    for (auto& call : next) calls[call->position] = std::move(call);
  }
}

std::vector<std::unique_ptr<EngineChannels::Call>>
EngineChannels::AwaitNextCalls(const std::vector<std::unique_ptr<Call>>& calls,
                               absl::Time deadline) const {
  std::vector<Call*> pending;
  for (const auto& call : calls) {
    if (absl::IsUnavailable(call->status)) pending.push_back(call.get());
  }
  if (pending.empty()) return {};
  const auto next_of =
      [this](const Call& call) ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        const auto found = channels_.find(call.job);
        return found == channels_.end() || found->second == call.channel
                   ? nullptr
                   : found->second;
      };
  // A job that had an engine and is no longer listed gets none.
  const auto is_over =
      [this](const Call& call) ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return call.channel != nullptr && !channels_.contains(call.job);
      };
  const auto has_next = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    bool all_over = true;
    for (const Call* call : pending) {
      if (next_of(*call) != nullptr) return true;
      all_over = all_over && is_over(*call);
    }
    return all_over;
  };
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithDeadline(absl::Condition(&has_next), deadline);
  std::vector<std::unique_ptr<Call>> next;
  for (const Call* call : pending) {
    std::shared_ptr<Channel> channel = next_of(*call);
    if (channel == nullptr) continue;
    next.push_back(std::make_unique<Call>());
    next.back()->position = call->position;
    next.back()->job = call->job;
    next.back()->channel = std::move(channel);
    next.back()->context = MakeContext(deadline, nullptr);
  }
  return next;
}

absl::Status EngineChannels::PauseAll(absl::Time deadline) {
  absl::Status first;
  bool is_late = false;
  do {
    const absl::Time end = std::min(deadline, absl::Now() + kPauseAgain);
    v1::RestRequest request;
    SetTimeout(end, request.mutable_timeout());
    const auto calls = MakeCalls(end + kPauseAnswerTime, nullptr);
    AskAll(calls, [&request](Call* call, OnAnswer on_answer) {
      call->channel->stub->async()->Rest(call->context.get(), &request,
                                         &call->pause_reply,
                                         std::move(on_answer));
    });
    first = absl::OkStatus();
    is_late = false;
    for (const auto& call : calls) {
      if (!absl::IsUnavailable(call->status)) first.Update(call->status);
      is_late |= absl::IsDeadlineExceeded(call->status);
    }
  } while (is_late && absl::Now() < deadline);
  return first;
}

absl::Status EngineChannels::DrainAll(bool resume, absl::Time deadline,
                                      const grpc::ServerContext* caller) {
  const v1::DrainRequest request = MakeDrain(resume, deadline);
  const auto calls = MakeCalls(deadline, caller);
  AskAll(calls, [&request](Call* call, OnAnswer on_answer) {
    call->channel->stub->async()->Drain(call->context.get(), &request,
                                        &call->drain_reply,
                                        std::move(on_answer));
  });
  absl::Status first;
  for (const auto& call : calls) {
    if (IsCancelled(caller)) return absl::CancelledError("not awaited");
    if (absl::IsUnavailable(call->status)) {
      // An engine that is started later takes steps, unless the daemon drains.
      call->status =
          resume ? absl::OkStatus()
                 : DrainNext(call->job, call->channel, deadline, caller);
    }
    first.Update(call->status);
  }
  return first;
}

std::shared_ptr<EngineChannels::Channel> EngineChannels::Next(
    const std::string& job, const std::shared_ptr<Channel>& last,
    absl::Time deadline, const grpc::ServerContext* caller,
    absl::Status* status) const {
  absl::MutexLock lock(&mutex_);
  const auto has_next = [this, &job,
                         &last]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    const auto found = channels_.find(job);
    return found == channels_.end() ||
           (found->second != nullptr && found->second != last);
  };
  while (!mutex_.AwaitWithDeadline(absl::Condition(&has_next),
                                   std::min(deadline, absl::Now() + kLook))) {
    if (absl::Now() < deadline && !IsCancelled(caller)) continue;
    *status = NoEngine(job);
    return nullptr;
  }
  const auto found = channels_.find(job);
  return found == channels_.end() ? nullptr : found->second;
}

// Waits for the drain of the next engine, which was told to drain at its start.
absl::Status EngineChannels::DrainNext(
    const std::string& job, std::shared_ptr<Channel> last, absl::Time deadline,
    const grpc::ServerContext* caller) const {
  absl::Status status;
  do {
    status = absl::OkStatus();
    last = Next(job, last, deadline, caller, &status);
    if (last == nullptr) return status;
    const auto context = MakeContext(deadline, caller);
    v1::DrainReply reply;
    const v1::DrainRequest request = MakeDrain(/*resume=*/false, deadline);
    status = Named(job, last->stub->Drain(context.get(), request, &reply));
  } while (absl::IsUnavailable(status));
  return status;
}

absl::Status EngineChannels::Pause(const std::string& job,
                                   absl::Time deadline) {
  const std::shared_ptr<Channel> channel = Find(job);
  if (channel == nullptr) return NoEngine(job);
  v1::RestRequest request;
  SetTimeout(deadline, request.mutable_timeout());
  grpc::ClientContext context;
  SetUp(&context, deadline + kPauseAnswerTime);
  v1::RestReply reply;
  return Named(job, channel->stub->Rest(&context, request, &reply));
}

absl::StatusOr<v1::SetJobReply> EngineChannels::SetJob(
    const Engine& engine, const v1::SetJobRequest& request,
    absl::Time deadline) {
  if (engine == nullptr) return NoEngine(request.name());
  grpc::ClientContext context;
  SetUp(&context, deadline);
  v1::SetJobReply reply;
  const grpc::Status status = engine->stub->SetJob(&context, request, &reply);
  // The engine gave no answer.
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ||
      status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return Named(request.name(), status);
  }
  if (!status.ok()) return FromGrpc(status);
  return reply;
}

absl::Status EngineChannels::VerifyJob(
    const Engine& engine, const std::string& job,
    const grpc::ServerContext* caller,
    absl::FunctionRef<bool(const v1::VerifyJobProgress&)> pass) {
  if (engine == nullptr) return NoEngine(job);
  const auto context = MakeContext(absl::InfiniteFuture(), caller);
  v1::VerifyJobRequest request;
  request.set_name(job);
  const auto reader = engine->stub->VerifyJob(context.get(), request);
  v1::VerifyJobProgress progress;
  bool goes_on = true;
  while (goes_on && reader->Read(&progress)) goes_on = pass(progress);
  if (!goes_on) context->TryCancel();
  return Named(job, reader->Finish());
}

absl::Status EngineChannels::TraceJob(
    const Engine& engine, const v1::TraceJobRequest& request,
    const grpc::ServerContext* caller,
    absl::FunctionRef<bool(const v1::TraceChunk&)> pass) {
  if (engine == nullptr) return NoEngine(request.name());
  const auto context = MakeContext(absl::InfiniteFuture(), caller);
  const auto reader = engine->stub->TraceJob(context.get(), request);
  v1::TraceChunk chunk;
  bool goes_on = true;
  while (goes_on && reader->Read(&chunk)) goes_on = pass(chunk);
  if (!goes_on) context->TryCancel();
  return Named(request.name(), reader->Finish());
}

}  // namespace optstate::admin
