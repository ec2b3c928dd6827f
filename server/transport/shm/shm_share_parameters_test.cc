// Tests how ranks get the memory of a device that has parameters.

#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/conversions.h"
#include "server/transport/shm/shm_fixture.h"

namespace optstate::transport {
namespace {

using ShmShareParametersTest = ShmFixture;

TEST_F(ShmShareParametersTest, ARankOnADeviceGetsItsMemory) {
  auto peer = Connect(0);
  ASSERT_TRUE(peer->Register().ok());
  ASSERT_TRUE(peer->SendAttach(peer->MakeSegment()).ok());
  const auto attached = peer->Receive();
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_TRUE(attached->attach().shares_parameters());
  v1::SessionRequest request;
  request.set_request_id(9);
  request.mutable_share_parameters()->set_device(FakeJob::kDevice);
  ASSERT_TRUE(peer->Send(request).ok());
  const auto reply = peer->Receive();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->request_id(), 9u);
  EXPECT_EQ(reply->status().code(), 0);
  const v1::ShareParametersReply& shared = reply->share_parameters();
  EXPECT_FALSE(shared.has_refused());
  EXPECT_EQ(shared.device_index(), FakeJob::kDeviceIndex);
  EXPECT_EQ(shared.memory_bytes(), FakeJob::kDeviceBytes);
  ASSERT_EQ(peer->received_fds.size(), 2u);
  for (UniqueFd& file : peer->received_fds) {
    const auto segment =
        shm::PeerSegment::Map(std::move(file), FakeJob::kDeviceBytes);
    ASSERT_TRUE(segment.ok()) << segment.status();
    EXPECT_EQ(segment->data()[0], std::byte{7});
  }
  // The session goes on, also after a refusal.
  request.mutable_share_parameters()->set_device("another");
  ASSERT_TRUE(peer->Send(request).ok());
  const auto refused = peer->Receive();
  ASSERT_TRUE(refused.ok()) << refused.status();
  EXPECT_EQ(refused->status().code(), 0);
  const absl::Status why = FromProto(refused->share_parameters().refused());
  EXPECT_TRUE(absl::IsFailedPrecondition(why)) << why;
  EXPECT_NE(why.message().find(FakeJob::kDevice), absl::string_view::npos);
  EXPECT_TRUE(peer->received_fds.empty());
  EXPECT_TRUE(peer->Call(peer->Push(1)).status.ok());
}

// Before the attach there is nothing to share; the session ends, as with other
// requests that are none of the socket's.
TEST_F(ShmShareParametersTest, BeforeTheAttachItEndsTheSession) {
  auto peer = Connect(0);
  ASSERT_TRUE(peer->Register().ok());
  v1::SessionRequest request;
  request.set_request_id(9);
  request.mutable_share_parameters()->set_device(FakeJob::kDevice);
  ASSERT_TRUE(peer->Send(request).ok());
  const absl::Status ended = peer->AwaitEnd();
  EXPECT_TRUE(absl::IsInvalidArgument(ended)) << ended;
  EXPECT_NE(ended.message().find("share_parameters"), absl::string_view::npos);
  ExpectServes(0);
}

}  // namespace
}  // namespace optstate::transport
