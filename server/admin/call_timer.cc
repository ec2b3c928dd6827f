#include "server/admin/call_timer.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"

namespace optstate::admin {
namespace {

namespace experimental = grpc::experimental;

class TimedCall final : public experimental::Interceptor {
 public:
  TimedCall(CallTimer* timer, experimental::ServerRpcInfo* info)
      : timer_(timer),
        call_(info->server_context()),
        message_limit_(timer->MessageLimitOf(info->method())) {
    const absl::Duration limit = timer->LimitOf(info->method());
    if (limit != absl::InfiniteDuration()) {
      timer_->Add(call_, absl::Now() + limit);
    }
  }
  ~TimedCall() override { timer_->Remove(call_); }

  void Intercept(experimental::InterceptorBatchMethods* methods) override {
    using Point = experimental::InterceptionHookPoints;
    if (message_limit_ != absl::InfiniteDuration()) {
      // Between these two the message waits for the caller to make room.
      if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_MESSAGE)) {
        timer_->Add(call_, absl::Now() + message_limit_);
      }
      if (methods->QueryInterceptionHookPoint(Point::POST_SEND_MESSAGE)) {
        timer_->Remove(call_);
      }
    }
    // The handler has returned; after this, gRPC frees the call.
    if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_STATUS)) {
      timer_->Remove(call_);
    }
    methods->Proceed();
  }

 private:
  CallTimer* const timer_;
  grpc::ServerContextBase* const call_;
  const absl::Duration message_limit_;
};

class Factory final : public experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(CallTimer* timer) : timer_(timer) {}
  experimental::Interceptor* CreateServerInterceptor(
      experimental::ServerRpcInfo* info) override {
    return new TimedCall(timer_, info);
  }

 private:
  CallTimer* const timer_;
};

}  // namespace

CallTimer::CallTimer(const Limits& limits)
    : limits_(limits), thread_([this] { Run(); }) {}

CallTimer::~CallTimer() {
  {
    absl::MutexLock lock(&mutex_);
    ends_ = true;
  }
  thread_.join();
}

std::vector<std::unique_ptr<experimental::ServerInterceptorFactoryInterface>>
CallTimer::Interceptors() {
  std::vector<std::unique_ptr<experimental::ServerInterceptorFactoryInterface>>
      factories;
  factories.push_back(std::make_unique<Factory>(this));
  return factories;
}

absl::Duration CallTimer::LimitOf(absl::string_view method) const {
  if (absl::StartsWith(method, "/grpc.reflection.")) return limits_.reflection;
  if (absl::StartsWith(method, "/grpc.health.") ||
      method == "/optstate.v1.Admin/DeleteJobWatched" ||
      method == "/optstate.v1.Admin/VerifyJob" ||
      method == "/optstate.v1.Admin/TraceJob" ||
      method == "/optstate.v1.Admin/SleepJob" ||
      method == "/optstate.v1.Admin/WakeJob") {
    return absl::InfiniteDuration();
  }
  return limits_.other;
}

absl::Duration CallTimer::MessageLimitOf(absl::string_view method) const {
  const bool may_last = LimitOf(method) == absl::InfiniteDuration();
  return may_last && absl::StartsWith(method, "/optstate.v1.Admin/")
             ? limits_.message
             : absl::InfiniteDuration();
}

void CallTimer::Add(grpc::ServerContextBase* call, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  calls_[call] = deadline;
  next_look_ = std::min(next_look_, deadline);
}

void CallTimer::Remove(grpc::ServerContextBase* call) {
  absl::MutexLock lock(&mutex_);
  calls_.erase(call);
}

void CallTimer::Run() {
  absl::MutexLock lock(&mutex_);
  while (!ends_) {
    absl::Time next = absl::InfiniteFuture();
    std::vector<grpc::ServerContextBase*> over;
    const absl::Time now = absl::Now();
    for (const auto& [call, deadline] : calls_) {
      if (deadline <= now) {
        over.push_back(call);
      } else {
        next = std::min(next, deadline);
      }
    }
    // Calls are cancelled under the mutex, so that none is freed meanwhile.
    for (grpc::ServerContextBase* call : over) {
      calls_.erase(call);
      call->TryCancel();
    }
    next_look_ = next;
    const auto changed = [this, next]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return ends_ || next_look_ < next;
    };
    mutex_.AwaitWithDeadline(absl::Condition(&changed), next);
  }
}

}  // namespace optstate::admin
