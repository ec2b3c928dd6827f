#include "server/admin/call_counter.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "optstate/v1/admin.grpc.pb.h"
#include "optstate/v1/engine.grpc.pb.h"
#include "server/observe/counters.h"

namespace optstate::admin {
namespace {

using Counts = std::array<uint64_t, observe::kCodes>;

// Answers with what the test says; a verification reports three times before.
class AnsweringAdmin : public v1::Admin::Service {
 public:
  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::ServerStatus*) override {
    return answer_;
  }
  grpc::Status VerifyJob(
      grpc::ServerContext*, const v1::VerifyJobRequest*,
      grpc::ServerWriter<v1::VerifyJobProgress>* writer) override {
    for (int i = 0; i < 3; ++i) writer->Write({});
    return answer_;
  }
  void set_answer(grpc::StatusCode code) { answer_ = grpc::Status(code, "x"); }

 private:
  grpc::Status answer_;
};

class CallCounterTest : public testing::Test {
 protected:
  CallCounterTest() {
    std::vector<
        std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
        interceptors;
    interceptors.push_back(MakeCallCounter());
    grpc::ServerBuilder builder;
    builder.experimental().SetInterceptorCreators(std::move(interceptors));
    builder.RegisterService(static_cast<v1::Admin::Service*>(&admin_));
    builder.RegisterService(&engine_);
    server_ = builder.BuildAndStart();
    channel_ = server_->InProcessChannel({});
    stub_ = v1::Admin::NewStub(channel_);
  }
  ~CallCounterTest() override { server_->Shutdown(); }

  static Counts Now() {
    Counts counts{};
    for (size_t code = 0; code < counts.size(); ++code) {
      counts[code] = observe::CountOf(observe::Answered::kAdminCall,
                                      static_cast<absl::StatusCode>(code));
    }
    return counts;
  }
  // The answers counted since, by code.
  Counts Counted() const {
    Counts counts = Now();
    for (size_t code = 0; code < counts.size(); ++code) {
      counts[code] -= before_[code];
    }
    return counts;
  }
  static Counts One(absl::StatusCode code) {
    Counts counts{};
    counts[static_cast<size_t>(code)] = 1;
    return counts;
  }

  grpc::Status GetStatus() {
    grpc::ClientContext context;
    v1::ServerStatus status;
    return stub_->GetStatus(&context, {}, &status);
  }

  const Counts before_ = Now();  // the counters are the process's
  AnsweringAdmin admin_;
  v1::Engine::Service engine_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Admin::Stub> stub_;
};

TEST_F(CallCounterTest, ACallThatSucceeds) {
  EXPECT_TRUE(GetStatus().ok());
  EXPECT_EQ(Counted(), One(absl::StatusCode::kOk));
}

TEST_F(CallCounterTest, AnErrorCountsUnderItsCode) {
  admin_.set_answer(grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(GetStatus().error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Counted(), One(absl::StatusCode::kPermissionDenied));
}

TEST_F(CallCounterTest, EveryCallCounts) {
  EXPECT_TRUE(GetStatus().ok());
  EXPECT_TRUE(GetStatus().ok());
  admin_.set_answer(grpc::StatusCode::NOT_FOUND);
  EXPECT_FALSE(GetStatus().ok());
  Counts expected{};
  expected[static_cast<size_t>(absl::StatusCode::kOk)] = 2;
  expected[static_cast<size_t>(absl::StatusCode::kNotFound)] = 1;
  EXPECT_EQ(Counted(), expected);
}

TEST_F(CallCounterTest, AStreamCountsOnceWithItsEnd) {
  admin_.set_answer(grpc::StatusCode::ABORTED);
  grpc::ClientContext context;
  const auto reader = stub_->VerifyJob(&context, {});
  v1::VerifyJobProgress progress;
  int messages = 0;
  while (reader->Read(&progress)) ++messages;
  EXPECT_EQ(messages, 3);
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(Counted(), One(absl::StatusCode::kAborted));
}

// An older build lacks calls of a newer optctl.
TEST_F(CallCounterTest, ACallThatIsNotImplementedCounts) {
  grpc::ClientContext context;
  v1::ListJobsReply reply;
  EXPECT_EQ(stub_->ListJobs(&context, {}, &reply).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(Counted(), One(absl::StatusCode::kUnimplemented));
}

TEST_F(CallCounterTest, CallsOfOtherServicesDoNotCount) {
  const auto stub = v1::Engine::NewStub(channel_);
  grpc::ClientContext context;
  v1::Job job;
  EXPECT_EQ(stub->GetJob(&context, {}, &job).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(Counted(), Counts{});
}

}  // namespace
}  // namespace optstate::admin
