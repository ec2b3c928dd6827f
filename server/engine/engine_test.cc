// Tests engines as the supervisor runs them.

#include "server/engine/engine.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "server/engine/engine_fixture.h"

namespace optstate::engine {
namespace {

TEST_F(EngineTest, TakesStepsAndEndsWhenItIsToldTo) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  for (uint64_t step = 1; step <= 3; ++step) TakeStep(peer.get(), step);
  const v1::Job job = engine->Describe();
  EXPECT_EQ(job.name(), "test");
  EXPECT_EQ(job.committed_step(), 3u);
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(job.engine_pid(), engine->pid());
  EXPECT_EQ(job.engine_restarts(), 2u);
  EXPECT_EQ(job.state_dir(), job_dir_);
  ASSERT_EQ(job.wires_size(), 1);
  EXPECT_EQ(job.wires(0).wire(), "shm");
  // 5,000 gradients in float32 and one in bfloat16, three times.
  EXPECT_EQ(job.wires(0).gradient_bytes(), 3u * (5000 * 4 + 2));
  EXPECT_GE(job.wires(0).sent_bytes(), 3u * (5000 * 4 + 2));
  EXPECT_EQ(job.wires(0).load_bytes(), (5000u + 1) * 4);
  EXPECT_EQ(job.wires(0).refused_size(), 0);
  EXPECT_EQ(engine->StopAndWait(), 0);
  EXPECT_TRUE(peer->AwaitEnd().ok());  // no last reply: the rank connects again
}

TEST_F(EngineTest, SignalsAreTheSupervisorsBusiness) {
  auto engine = Start();
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) {
    ASSERT_EQ(::kill(engine->pid(), signal), 0);
  }
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  EXPECT_EQ(engine->StopAndWait(), 0);
}

TEST_F(EngineTest, StateOutlivesAnEngineKilledBetweenSteps) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  engine->Kill();
  EXPECT_TRUE(peer->AwaitEnd().ok());  // no last reply

  engine = Start();
  v1::HelloReply hello;
  peer = engine->Connect(v1::WIRE_SHM, &hello);
  EXPECT_NE(hello.engine_instance(), 0u);
  EXPECT_EQ(hello.protocol_version(), shm::kProtocolVersion);
  Begin(peer.get(), false);
  EXPECT_EQ(engine->Describe().committed_step(), 1u);
  TakeStep(peer.get(), 2);
}

TEST_F(EngineTest, ASecondEngineWaitsForTheFirst) {
  auto first = Start();
  auto second = std::make_unique<TestEngine>(job_dir_);
  second->supervisor()->Supervise();
  second->supervisor()->StartJob();
  auto peer = first->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  first->Kill();
  second->supervisor()->AwaitReady();
  EXPECT_EQ(second->Describe().committed_step(), 1u);
}

TEST_F(EngineTest, AnEphemeralJobIsOverWithItsLastSession) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), true);
  peer.reset();
  EXPECT_TRUE(engine->supervisor()->AwaitOther().event.has_finished());
  EXPECT_TRUE(engine->supervisor()->kept().empty());
  v1::HelloReply hello;
  engine->Connect(v1::WIRE_SHM, &hello);
  EXPECT_TRUE(absl::IsUnavailable(FromProto(hello.status())));
  EXPECT_EQ(engine->StopAndWait(), 0);
}

TEST_F(EngineTest, AJobThatNobodyRegistersIsOver) {
  auto engine = Start();
  engine->Connect();
  EXPECT_TRUE(engine->supervisor()->AwaitEvent().event.has_finished());
}

// A job that was only registered is not kept either, also by an engine that
// died.
TEST_F(EngineTest, AnEphemeralJobThatNobodyAttachesToIsOver) {
  auto engine = Start();
  auto peer = engine->Connect();
  Register(peer.get(), true);
  engine->Kill();
  engine = Start();
  peer = engine->Connect();
  Register(peer.get(), true);
  peer.reset();
  EXPECT_TRUE(engine->supervisor()->AwaitEvent().event.has_finished());
}

TEST_F(EngineTest, RefusesWhatItDoesNotUnderstand) {
  auto engine = Start();
  v1::HelloReply hello;
  engine->Connect(static_cast<v1::Wire>(9), &hello);
  EXPECT_TRUE(absl::IsInvalidArgument(FromProto(hello.status())));
  TestSupervisor& supervisor = *engine->supervisor();
  supervisor.SendBytes("\xff\xff no SupervisorRequest", STDIN_FILENO);
  v1::SupervisorRequest request;
  request.mutable_adopt_connection();
  supervisor.Send(request);  // misses its fd
  request.mutable_start_job();
  supervisor.Send(request, STDIN_FILENO);  // brings one
  supervisor.SendBytes(std::string(100000, 'x'));
  auto peer = engine->Connect();
  Begin(peer.get(), false);
}

TEST_F(EngineTest, AJobThatCannotBeOpenedSaysWhy) {
  {
    auto engine = Start();
    auto peer = engine->Connect();
    Begin(peer.get(), false);
    TakeStep(peer.get(), 1);
  }
  // This corrupts every file of the job: none of them is ten bytes long.
  const std::string command =
      absl::StrCat("for f in $(find ", job_dir_,
                   " -type f ! -name lock); do truncate -s 10 $f; done");
  ASSERT_EQ(std::system(command.c_str()), 0);
  auto engine = Start();
  v1::HelloReply hello;
  auto peer = engine->Connect(v1::WIRE_SHM, &hello);
  absl::Status status = FromProto(hello.status());
  if (status.ok()) status = peer->Register();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  const v1::Job job = engine->Describe();
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_FAILED);
  EXPECT_FALSE(job.reason().empty());
  ASSERT_EQ(job.wires_size(), 1);
  ASSERT_EQ(job.wires(0).refused_size(), 1);
  EXPECT_EQ(job.wires(0).refused(0).code(), "data_loss");
  EXPECT_EQ(job.wires(0).refused(0).requests(), 1u);
}

TEST_F(EngineTest, DrainRefusesNewStepsUntilItIsResumed) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  v1::DrainRequest request;
  request.mutable_timeout()->set_seconds(60);
  v1::DrainReply reply;
  engine->supervisor()->Drain(true);
  {
    grpc::ClientContext context;
    ASSERT_TRUE(engine->stub()->Drain(&context, request, &reply).ok());
  }
  EXPECT_TRUE(absl::IsUnavailable(peer->Call(peer->Push(1)).status));
  // Drain and resume apply in their order, whichever is awaited.
  engine->supervisor()->Drain(false);
  engine->supervisor()->Drain(true);
  engine->supervisor()->Drain(false);
  request.set_resume(true);
  {
    grpc::ClientContext context;
    ASSERT_TRUE(engine->stub()->Drain(&context, request, &reply).ok());
  }
  TakeStep(peer.get(), 1);
}

TEST_F(EngineTest, ListsParameters) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  v1::ListParametersRequest request;
  request.set_job("test");
  v1::ListParametersReply reply;
  grpc::ClientContext context;
  ASSERT_TRUE(engine->stub()->ListParameters(&context, request, &reply).ok());
  EXPECT_EQ(reply.parameters_size(), 3);
  grpc::ClientContext another;
  request.set_job("other");
  EXPECT_EQ(
      engine->stub()->ListParameters(&another, request, &reply).error_code(),
      grpc::StatusCode::NOT_FOUND);
}

TEST_F(EngineTest, TracesItsSteps) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  TakeStep(peer.get(), 1);
  v1::TraceJobRequest request;
  request.set_name("test");
  request.set_steps(2);
  grpc::ClientContext context;
  const auto reader = engine->stub()->TraceJob(&context, request);
  v1::TraceChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));  // it records from now on
  EXPECT_NE(chunk.began_at_ns(), 0);
  for (uint64_t step = 2; step <= 4; ++step) TakeStep(peer.get(), step);
  std::set<uint64_t> steps;
  do {
    for (const v1::TraceSpan& span : chunk.spans()) steps.insert(span.step());
  } while (!chunk.done() && reader->Read(&chunk));
  EXPECT_TRUE(chunk.done());
  EXPECT_EQ(chunk.steps(), 2u);
  EXPECT_EQ(steps, (std::set<uint64_t>{2, 3}));
  EXPECT_FALSE(reader->Read(&chunk));
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(EngineTest, RefusesTracesThatCannotBe) {
  auto engine = Start();
  const auto code_of = [&](const std::string& name, uint32_t steps) {
    v1::TraceJobRequest request;
    request.set_name(name);
    request.set_steps(steps);
    grpc::ClientContext context;
    return engine->stub()->TraceJob(&context, request)->Finish().error_code();
  };
  EXPECT_EQ(code_of("test", 1), grpc::StatusCode::FAILED_PRECONDITION);
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  EXPECT_EQ(code_of("other", 1), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(code_of("test", 1001), grpc::StatusCode::INVALID_ARGUMENT);
}

// A caller that goes away makes way for the next one.
TEST_F(EngineTest, ATraceEndsWithItsCaller) {
  auto engine = Start();
  auto peer = engine->Connect();
  Begin(peer.get(), false);
  v1::TraceJobRequest request;
  request.set_steps(1);
  v1::TraceChunk chunk;
  {
    grpc::ClientContext context;
    const auto reader = engine->stub()->TraceJob(&context, request);
    ASSERT_TRUE(reader->Read(&chunk));
    grpc::ClientContext second;
    EXPECT_EQ(engine->stub()->TraceJob(&second, request)->Finish().error_code(),
              grpc::StatusCode::FAILED_PRECONDITION);
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  // The engine notices it at the next chunk.
  while (true) {
    grpc::ClientContext context;
    const auto reader = engine->stub()->TraceJob(&context, request);
    if (reader->Read(&chunk)) {
      TakeStep(peer.get(), 1);
      while (!chunk.done() && reader->Read(&chunk)) {
      }
      EXPECT_EQ(chunk.steps(), 1u);
      EXPECT_TRUE(reader->Finish().ok());
      return;
    }
    ASSERT_EQ(reader->Finish().error_code(),
              grpc::StatusCode::FAILED_PRECONDITION);
  }
}

}  // namespace
}  // namespace optstate::engine
