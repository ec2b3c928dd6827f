// Traces of jobs through the Admin service.

#include <gmock/gmock.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "proto/types/unique_fd.h"
#include "server/admin/admin_server.h"
#include "server/admin/admin_service_fixture.h"
#include "server/admin/call_timer.h"

namespace optstate::admin {
namespace {

using ::testing::HasSubstr;

class AdminTraceTest : public AdminServiceTest {
 protected:
  absl::Status Trace(const std::string& job, uid_t uid = ::geteuid()) {
    seen_.clear();
    v1::TraceJobRequest request;
    request.set_name(job);
    request.set_steps(3);
    return service_->TraceJob(request, access::UnixCaller(uid),
                              /*call=*/nullptr,
                              [this](const v1::TraceChunk& chunk) {
                                seen_.push_back(chunk);
                                return true;
                              });
  }

  std::vector<v1::TraceChunk> seen_;
};

TEST_F(AdminTraceTest, WhatTheEngineTellsIsPassedOn) {
  AddJob("a", 1);
  const absl::Status status = Trace("a");
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_EQ(seen_.size(), 2u);
  ASSERT_EQ(seen_[0].lanes_size(), 1);
  EXPECT_EQ(seen_[0].lanes(0).name(), "lane of a");
  ASSERT_EQ(seen_[0].spans_size(), 1);
  EXPECT_EQ(seen_[0].spans(0).name(), "update");
  EXPECT_TRUE(seen_[1].done());
  EXPECT_EQ(seen_[1].steps(), 3u);
}

TEST_F(AdminTraceTest, NameAndUserAreChecked) {
  AddJob("a", 1);
  EXPECT_TRUE(absl::IsInvalidArgument(Trace("../a")));
  EXPECT_TRUE(absl::IsNotFound(Trace("b")));
  control_.jobs["a"].uid = 4711;
  EXPECT_TRUE(Trace("a", 4711).ok());
  EXPECT_TRUE(Trace("a", 0).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(Trace("a", 4712)));
  EXPECT_TRUE(seen_.empty());
  control_.jobs["a"].access.set_is_private(true);
  EXPECT_TRUE(absl::IsNotFound(Trace("a", 4712)));
  EXPECT_TRUE(Trace("a", 4711).ok());
}

TEST_F(AdminTraceTest, AnEngineThatDiesMeanwhileIsNamed) {
  AddJob("a", 1, /*hangs=*/false, /*dies=*/true);
  const absl::Status status = Trace("a");
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("engine of job \"a\""));
  EXPECT_EQ(seen_.size(), 1u);
  engines_.Lose("a");
  EXPECT_TRUE(absl::IsUnavailable(Trace("a")));
}

TEST_F(AdminTraceTest, AnEngineOfAnOlderBuildIsNamed) {
  AddJob("a", 2);  // which stands for an older build
  const absl::Status status = Trace("a");
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("optctl upgrade"));
}

TEST_F(AdminTraceTest, ACallerThatDoesNotListenEndsIt) {
  FakeEngineService& engine = AddJob("a", 1, /*hangs=*/true);
  int messages = 0;
  v1::TraceJobRequest request;
  request.set_name("a");
  const absl::Status status = service_->TraceJob(
      request, access::UnixCaller(::geteuid()), /*call=*/nullptr,
      [&messages](const v1::TraceChunk&) { return ++messages < 3; });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(messages, 3);
  engine.AwaitTraceCancelled();
}

// One that is stopped takes no messages either: it would keep the trace, and
// the memory for it, as long as it stands there.
TEST_F(AdminTraceTest, ACallerThatTakesNoMessagesEndsIt) {
  FakeEngineService& engine = AddJob("a", 1, /*hangs=*/true);
  AdminServer::Limits limits;
  limits.calls.message = absl::Milliseconds(1);
  const auto server = AdminServer::Start(service_.get(), limits);
  ASSERT_TRUE(server.ok()) << server.status();
  int fds[2];
  ASSERT_EQ(
      ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds),
      0);
  const auto stub =
      v1::Admin::NewStub(grpc::CreateInsecureChannelFromFd("daemon", fds[1]));
  const absl::Status served =
      (*server)->Serve(UniqueFd(fds[0]), Operator(), "test");
  ASSERT_TRUE(served.ok()) << served;
  grpc::ClientContext context;
  v1::TraceJobRequest request;
  request.set_name("a");
  const auto reader = stub->TraceJob(&context, request);
  engine.AwaitTraceCancelled();
  v1::TraceChunk chunk;
  while (reader->Read(&chunk)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(AdminTraceTest, ItMayLastAndItsMessagesMayNot) {
  const CallTimer timer({});
  EXPECT_EQ(timer.LimitOf("/optstate.v1.Admin/TraceJob"),
            absl::InfiniteDuration());
  EXPECT_EQ(timer.MessageLimitOf("/optstate.v1.Admin/TraceJob"),
            absl::Minutes(1));
  // Calls that have a limit need none for each message; health checks keep no
  // thread.
  for (const char* method :
       {"/optstate.v1.Admin/GetJob", "/optstate.v1.Admin/WatchEvents",
        "/grpc.health.v1.Health/Watch"}) {
    EXPECT_EQ(timer.MessageLimitOf(method), absl::InfiniteDuration()) << method;
  }
}

}  // namespace
}  // namespace optstate::admin
