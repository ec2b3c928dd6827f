#include "server/session/wire_counters.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::session {
namespace {

TEST(WireCountersTest, WiresThatWereUsedAreDescribed) {
  WireCounters wires;
  v1::Job job;
  wires.Describe(&job);
  EXPECT_EQ(job.wires_size(), 0);

  wires.Of("grpc")->AddGradients(1);
  wires.Of("grpc")->AddGradients(2);
  wires.Of("grpc")->AddSent(10);
  wires.Of("grpc")->AddLoaded(100);
  wires.Describe(&job);
  ASSERT_EQ(job.wires_size(), 1);
  EXPECT_EQ(job.wires(0).wire(), "grpc");
  EXPECT_EQ(job.wires(0).gradient_bytes(), 3u);
  EXPECT_EQ(job.wires(0).sent_bytes(), 10u);
  EXPECT_EQ(job.wires(0).load_bytes(), 100u);

  wires.Of("shm")->AddLoaded(7);
  job.Clear();
  wires.Describe(&job);
  ASSERT_EQ(job.wires_size(), 2);
  EXPECT_EQ(job.wires(0).wire(), "shm");
  EXPECT_EQ(job.wires(0).load_bytes(), 7u);
  EXPECT_EQ(job.wires(1).load_bytes(), 100u);
}

TEST(WireCountersTest, RefusedRequestsAreCountedByCode) {
  WireCounters wires;
  wires.Of("grpc")->AddRefused(absl::StatusCode::kAborted);
  wires.Of("grpc")->AddRefused(absl::StatusCode::kFailedPrecondition);
  wires.Of("grpc")->AddRefused(absl::StatusCode::kFailedPrecondition);
  wires.Of("grpc")->AddRefused(static_cast<absl::StatusCode>(99));
  v1::Job job;
  wires.Describe(&job);
  ASSERT_EQ(job.wires_size(), 1);
  std::map<std::string, uint64_t> refused;
  for (const v1::RefusedRequests& each : job.wires(0).refused()) {
    refused[each.code()] = each.requests();
  }
  EXPECT_EQ(refused,
            (std::map<std::string, uint64_t>{
                {"unknown", 1}, {"failed_precondition", 2}, {"aborted", 1}}));
}

TEST(WireCountersTest, QueuesAreThoseOfSessionsThatAreThere) {
  WireCounters wires;
  const WireCounters::Queues first = [] {
    return WireCounters::QueueLengths{.requests = 3, .replies = 10};
  };
  const WireCounters::Queues second = [] {
    return WireCounters::QueueLengths{.requests = 4, .replies = 20};
  };
  const WireCounters::Queues idle = [] { return WireCounters::QueueLengths(); };
  wires.AddSession("shm", &first);
  wires.AddSession("shm", &second);
  wires.AddSession("grpc", &idle);
  v1::Job job;
  wires.Describe(&job);
  ASSERT_EQ(job.wires_size(), 2);
  EXPECT_EQ(job.wires(0).wire(), "shm");
  EXPECT_EQ(job.wires(0).requests_waiting(), 7u);
  EXPECT_EQ(job.wires(0).replies_waiting(), 30u);
  EXPECT_EQ(job.wires(1).wire(), "grpc");
  EXPECT_EQ(job.wires(1).replies_waiting(), 0u);
  wires.RemoveSession(&first);
  wires.RemoveSession(&idle);
  job.Clear();
  wires.Describe(&job);
  ASSERT_EQ(job.wires_size(), 1);
  EXPECT_EQ(job.wires(0).requests_waiting(), 4u);
  EXPECT_EQ(job.wires(0).replies_waiting(), 20u);
}

}  // namespace
}  // namespace optstate::session
