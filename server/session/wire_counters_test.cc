#include "server/session/wire_counters.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace optstate::session
