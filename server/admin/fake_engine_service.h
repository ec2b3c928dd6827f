#ifndef OPTSTATE_SERVER_ADMIN_FAKE_ENGINE_SERVICE_H_
#define OPTSTATE_SERVER_ADMIN_FAKE_ENGINE_SERVICE_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/synchronization/notification.h"
#include "optstate/v1/engine.grpc.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate::admin {

// Answers like an engine with `sessions` ranks. A hanging one answers at once
// with the error that its caller would get in the end: no time passes that a
// slow machine could stretch. A dying one is gone at the first question.
class FakeEngineService : public v1::Engine::Service {
 public:
  FakeEngineService(uint32_t sessions, bool hangs, bool dies)
      : sessions_(sessions), hangs_(hangs), dies_(dies) {
    server_ = grpc::ServerBuilder().RegisterService(this).BuildAndStart();
  }
  ~FakeEngineService() override {
    server_->Shutdown(std::chrono::system_clock::now());
  }

  UniqueFd Connect() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC,
                           0, fds),
              0);
    grpc::AddInsecureChannelFromFd(server_.get(), fds[0]);
    return UniqueFd(fds[1]);
  }

  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest*,
                      v1::Job* job) override {
    const int ask = ++asks_;
    Hold* const hold = holds_;
    if (hold != nullptr && ask == 1) {
      hold->begun.Notify();
      hold->may_end.WaitForNotification();
    }
    if (dies_) {
      asked_.Notify();
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "socket closed");
    }
    if (hangs_) return NoAnswerError();
    job->set_name("what the engine thinks");
    job->set_phase(phase_);
    job->set_committed_step(static_cast<uint64_t>(ask));
    job->set_uid(uid_);
    job->set_engine_pid(18);
    job->set_session_count(sessions_);
    job->set_state_bytes(100);
    job->mutable_disk()->set_durable_step(durable_step_);
    for (uint32_t i = 0; i < sessions_; ++i) job->add_sessions()->set_rank(i);
    return grpc::Status::OK;
  }
  grpc::Status ListParameters(grpc::ServerContext*,
                              const v1::ListParametersRequest* request,
                              v1::ListParametersReply* reply) override {
    ++orders_;
    if (hangs_) return NoAnswerError();
    reply->set_next_page_token(request->page_token() + "+");
    return grpc::Status::OK;
  }
  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest* request,
                     v1::DrainReply*) override {
    if (dies_) {
      asked_.Notify();
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "socket closed");
    }
    if (hangs_) return NoAnswerError();
    if (!request->resume() && sessions_ == 2) {
      return grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED,
                          "step 3 is open");
    }
    ++drains_;
    return grpc::Status::OK;
  }

  grpc::Status Rest(grpc::ServerContext*, const v1::RestRequest*,
                    v1::RestReply*) override {
    if (dies_) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "died");
    if (++pauses_ < 3 && sessions_ == 2) {
      return grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "step 3");
    }
    return grpc::Status::OK;
  }

  grpc::Status SetJob(grpc::ServerContext*, const v1::SetJobRequest* request,
                      v1::SetJobReply* reply) override {
    ++orders_;
    if (dies_) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "died");
    if (hangs_) return NoAnswerError();
    if (sessions_ == 2) {
      return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "no such call");
    }
    reply->mutable_storage()->set_host_budget_bytes(
        request->host_budget_bytes());
    return grpc::Status::OK;
  }

  // Finds one damage; a dying one ends after its first message, and a hanging
  // one goes on until it is cancelled.
  grpc::Status VerifyJob(
      grpc::ServerContext* context, const v1::VerifyJobRequest* request,
      grpc::ServerWriter<v1::VerifyJobProgress>* writer) override {
    ++orders_;
    v1::VerifyJobProgress progress;
    progress.set_records_total(2);
    progress.set_records(1);
    progress.add_damages()->set_file("records of " + request->name());
    writer->Write(progress);
    if (dies_) return {grpc::StatusCode::UNAVAILABLE, "socket closed"};
    progress.clear_damages();
    while (hangs_ && !context->IsCancelled()) writer->Write(progress);
    if (context->IsCancelled()) {
      verification_cancelled_.Notify();
      return {grpc::StatusCode::CANCELLED, "cancelled"};
    }
    progress.set_records(2);
    progress.set_done(true);
    writer->Write(progress);
    return grpc::Status::OK;
  }
  // Sends a chunk with a span; a dying one ends after it, and a hanging one
  // goes on until it is cancelled.
  grpc::Status TraceJob(grpc::ServerContext* context,
                        const v1::TraceJobRequest* request,
                        grpc::ServerWriter<v1::TraceChunk>* writer) override {
    ++orders_;
    if (sessions_ == 2) {
      return {grpc::StatusCode::UNIMPLEMENTED, "no such call"};
    }
    v1::TraceChunk chunk;
    chunk.add_lanes()->set_name("lane of " + request->name());
    chunk.add_spans()->set_name("update");
    writer->Write(chunk);
    if (dies_) return {grpc::StatusCode::UNAVAILABLE, "socket closed"};
    chunk.Clear();
    while (hangs_ && !context->IsCancelled()) writer->Write(chunk);
    if (context->IsCancelled()) {
      trace_cancelled_.Notify();
      return {grpc::StatusCode::CANCELLED, "cancelled"};
    }
    chunk.set_steps(request->steps());
    chunk.set_done(true);
    writer->Write(chunk);
    return grpc::Status::OK;
  }
  void AwaitTraceCancelled() { trace_cancelled_.WaitForNotification(); }
  void AwaitVerificationCancelled() {
    verification_cancelled_.WaitForNotification();
  }

  // The first question about the job begins, and is answered when it may end.
  struct Hold {
    absl::Notification begun;
    absl::Notification may_end;
  };
  // `hold` outlives the first question.
  void HoldFirstAnswer(Hold* hold) { holds_ = hold; }

  static grpc::Status NoAnswerError() {
    return {grpc::StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded"};
  }
  void set_phase(v1::JobPhase phase) { phase_ = phase; }
  void set_durable_step(uint64_t step) { durable_step_ = step; }
  void set_uid(uint32_t uid) { uid_ = uid; }  // of the job's owner; 0: not said
  int asks() const { return asks_; }          // for the job
  // Calls that not everybody may make: of parameters, to set, verify, trace.
  int orders() const { return orders_; }
  int drains() const { return drains_; }
  int pauses() const { return pauses_; }
  void AwaitQuestion() { asked_.WaitForNotification(); }

 private:
  const uint32_t sessions_;
  const bool hangs_;
  const bool dies_;
  std::atomic<Hold*> holds_ = nullptr;
  absl::Notification asked_;
  absl::Notification verification_cancelled_;
  absl::Notification trace_cancelled_;
  std::atomic<int> asks_ = 0;
  std::atomic<int> orders_ = 0;
  int drains_ = 0;
  int pauses_ = 0;
  std::atomic<v1::JobPhase> phase_{v1::JOB_PHASE_READY};
  std::atomic<uint64_t> durable_step_{0};
  std::atomic<uint32_t> uid_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_FAKE_ENGINE_SERVICE_H_
