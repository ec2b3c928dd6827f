#include "server/engine/engine_service.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/engine.grpc.pb.h"
#include "proto/types/grpc_status.h"
#include "proto/types/os_error.h"
#include "server/engine/memory_use.h"
#include "server/scheduler/workers/memory_bandwidth_record.h"
#include "spdlog/spdlog.h"

namespace optstate::engine {
namespace {

constexpr absl::Duration kDrainTimeout = absl::Seconds(30);
// The lease of a pause: time within which the supervisor says Stop. If the
// supervisor has died instead, the ranks go on after it.
constexpr absl::Duration kPauseLease = absl::Seconds(5);

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) +
         absl::Nanoseconds(duration.nanos());
}

class EngineServiceImpl final : public EngineService,
                                public v1::Engine::Service {
 public:
  EngineServiceImpl(const v1::EngineConfig& config, session::Job* job,
                    const absl::Status& failure,
                    const session::WireCounters* wires)
      : config_(config),
        job_(job),
        failure_(failure),
        wires_(*wires),
        memory_bandwidth_(config.daemon().state_dir()) {}
  ~EngineServiceImpl() override;

  absl::Status Start();
  absl::Status Serve(UniqueFd socket) override;

  grpc::Status GetJob(grpc::ServerContext* context,
                      const v1::GetJobRequest* request,
                      v1::Job* reply) override;
  grpc::Status ListParameters(grpc::ServerContext* context,
                              const v1::ListParametersRequest* request,
                              v1::ListParametersReply* reply) override;
  grpc::Status Drain(grpc::ServerContext* context,
                     const v1::DrainRequest* request,
                     v1::DrainReply* reply) override;
  grpc::Status Rest(grpc::ServerContext* context,
                    const v1::RestRequest* request,
                    v1::RestReply* reply) override;
  grpc::Status VerifyJob(
      grpc::ServerContext* context, const v1::VerifyJobRequest* request,
      grpc::ServerWriter<v1::VerifyJobProgress>* writer) override;
  grpc::Status SetJob(grpc::ServerContext* context,
                      const v1::SetJobRequest* request,
                      v1::SetJobReply* reply) override;
  grpc::Status TraceJob(grpc::ServerContext* context,
                        const v1::TraceJobRequest* request,
                        grpc::ServerWriter<v1::TraceChunk>* writer) override;

 private:
  absl::Status CheckName(const std::string& name) const;
  void AddMemoryShare(v1::Job* job) const;

  const v1::EngineConfig config_;
  session::Job* const job_;
  const absl::Status failure_;
  const session::WireCounters& wires_;
  mutable scheduler::MemoryBandwidthReader memory_bandwidth_;
  std::unique_ptr<grpc::Server> server_;
};

EngineServiceImpl::~EngineServiceImpl() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

absl::Status EngineServiceImpl::Start() {
  grpc::ServerBuilder builder;
  builder.RegisterService(static_cast<v1::Engine::Service*>(this));
  builder.SetMaxSendMessageSize(-1);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::InternalError(
        "the engine's private gRPC server did not start");
  }
  return absl::OkStatus();
}

absl::Status EngineServiceImpl::Serve(UniqueFd socket) {
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    return OsError(errno, "fcntl of the private gRPC socket");
  }
  grpc::AddInsecureChannelFromFd(server_.get(), socket.release());
  return absl::OkStatus();
}

absl::Status EngineServiceImpl::CheckName(const std::string& name) const {
  if (name.empty() || name == config_.job()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("this is the engine of job ",
                                          config_.job(), ", not of ", name));
}

void EngineServiceImpl::AddMemoryShare(v1::Job* job) const {
  const double of = memory_bandwidth_.bytes_per_s();
  job->set_memory_bytes_per_s(of);
  if (of <= 0 || !job->has_last_step_times()) return;
  for (v1::StepTimes* times :
       {job->mutable_last_step_times(), job->mutable_mean_step_times()}) {
    if (times->update_ns() == 0) continue;
    times->set_memory_share(static_cast<double>(times->update_bytes()) * 1e9 /
                            static_cast<double>(times->update_ns()) / of);
  }
}

grpc::Status EngineServiceImpl::GetJob(grpc::ServerContext* /*context*/,
                                       const v1::GetJobRequest* request,
                                       v1::Job* reply) {
  const absl::Status named = CheckName(request->name());
  if (!named.ok()) return ToGrpc(named);
  if (job_ != nullptr) {
    *reply = job_->Describe();
  } else {
    reply->set_phase(v1::JOB_PHASE_FAILED);
    reply->set_reason(std::string(failure_.message()));
    wires_.Describe(reply);
  }
  reply->set_name(config_.job());
  reply->set_uid(config_.uid());
  reply->set_state_dir(config_.job_dir());
  reply->set_engine_pid(::getpid());
  reply->set_engine_restarts(config_.restarts());
  AddMemoryShare(reply);
  // Memory use is read without the job's lock: steps go on.
  if (request->memory()) AddMemoryUse(config_.job_dir(), reply);
  return grpc::Status::OK;
}

grpc::Status EngineServiceImpl::ListParameters(
    grpc::ServerContext* /*context*/, const v1::ListParametersRequest* request,
    v1::ListParametersReply* reply) {
  const absl::Status named = CheckName(request->job());
  if (!named.ok()) return ToGrpc(named);
  if (job_ == nullptr) return ToGrpc(failure_);
  auto result = job_->ListParameters(*request);
  if (!result.ok()) return ToGrpc(result.status());
  *reply = *std::move(result);
  return grpc::Status::OK;
}

grpc::Status EngineServiceImpl::Drain(grpc::ServerContext* /*context*/,
                                      const v1::DrainRequest* request,
                                      v1::DrainReply* /*reply*/) {
  if (job_ == nullptr) return grpc::Status::OK;  // takes no steps anyway
  absl::Duration timeout = kDrainTimeout;
  if (request->has_timeout()) timeout = FromProto(request->timeout());
  const absl::Time deadline = absl::Now() + timeout;
  if (request->resume()) return ToGrpc(job_->AwaitResumed(deadline));
  const absl::Status drained = job_->AwaitDrained(deadline);
  spdlog::info("drained: job={} result=\"{}\"", config_.job(),
               drained.ToString());
  return ToGrpc(drained);
}

grpc::Status EngineServiceImpl::Rest(grpc::ServerContext* /*context*/,
                                     const v1::RestRequest* request,
                                     v1::RestReply* /*reply*/) {
  if (job_ == nullptr) return grpc::Status::OK;  // nothing can begin
  return ToGrpc(
      job_->Pause(absl::Now() + FromProto(request->timeout()), kPauseLease));
}

grpc::Status EngineServiceImpl::VerifyJob(
    grpc::ServerContext* context, const v1::VerifyJobRequest* request,
    grpc::ServerWriter<v1::VerifyJobProgress>* writer) {
  const absl::Status named = CheckName(request->name());
  if (!named.ok()) return ToGrpc(named);
  if (job_ == nullptr) return ToGrpc(failure_);
  v1::VerifyJobProgress last;
  const absl::Status verified =
      job_->Verify([&](const v1::VerifyJobProgress& progress) {
        last = progress;
        return !context->IsCancelled() && writer->Write(progress);
      });
  spdlog::info(
      "verified: job={} records={} of={} bytes={} damaged={} result=\"{}\"",
      config_.job(), last.records(), last.records_total(), last.bytes_read(),
      last.damaged(), verified.ToString());
  return ToGrpc(verified);
}

grpc::Status EngineServiceImpl::SetJob(grpc::ServerContext* /*context*/,
                                       const v1::SetJobRequest* request,
                                       v1::SetJobReply* reply) {
  const absl::Status named = CheckName(request->name());
  if (!named.ok()) return ToGrpc(named);
  if (job_ == nullptr) return ToGrpc(failure_);
  auto result = job_->Set(*request);
  if (!result.ok()) return ToGrpc(result.status());
  *reply = *std::move(result);
  return grpc::Status::OK;
}

grpc::Status EngineServiceImpl::TraceJob(
    grpc::ServerContext* context, const v1::TraceJobRequest* request,
    grpc::ServerWriter<v1::TraceChunk>* writer) {
  const absl::Status named = CheckName(request->name());
  if (!named.ok()) return ToGrpc(named);
  if (job_ == nullptr) return ToGrpc(failure_);
  uint32_t steps = 0;
  uint64_t lost_spans = 0;
  // A chunk without news shows that the engine is there.
  const absl::Status traced =
      job_->Trace(*request, absl::FromChrono(context->deadline()),
                  [&](const v1::TraceChunk& chunk) {
                    steps = chunk.steps();
                    lost_spans += chunk.lost_spans();
                    return !context->IsCancelled() && writer->Write(chunk);
                  });
  spdlog::info("traced: job={} steps={} lost_spans={} result=\"{}\"",
               config_.job(), steps, lost_spans, traced.ToString());
  return ToGrpc(traced);
}

}  // namespace

absl::StatusOr<std::unique_ptr<EngineService>> EngineService::Start(
    const v1::EngineConfig& config, session::Job* job,
    const absl::Status& failure, const session::WireCounters* wires) {
  auto service =
      std::make_unique<EngineServiceImpl>(config, job, failure, wires);
  const absl::Status started = service->Start();
  if (!started.ok()) return started;
  return service;
}

}  // namespace optstate::engine
