// Tests how ranks offer memory of a device that has their gradients.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/conversions.h"
#include "server/transport/shm/shm_fixture.h"

namespace optstate::transport {
namespace {

class ShmShareGradientsTest : public ShmFixture {
 protected:
  // Sends a request with as many fds of a segment.
  void Offer(ShmTestPeer* peer, const char* device, uint64_t bytes,
             size_t fds) {
    v1::SessionRequest request;
    request.set_request_id(9);
    request.mutable_share_gradients()->set_device(device);
    request.mutable_share_gradients()->set_memory_bytes(bytes);
    const std::vector<int> sent(fds, segment_.fd());
    ASSERT_TRUE(peer->Send(request, sent).ok());
  }
  // Returns why it was refused, if it was.
  static absl::Status Refusal(ShmTestPeer* peer) {
    const auto reply = peer->Receive();
    if (!reply.ok()) return reply.status();
    EXPECT_EQ(reply->request_id(), 9u);
    EXPECT_EQ(reply->status().code(), 0);
    EXPECT_TRUE(reply->has_share_gradients());
    EXPECT_TRUE(peer->received_fds.empty());
    return FromProto(reply->share_gradients().refused());
  }

  static constexpr uint64_t kBytes = 8192;
  const shm::SealedSegment segment_ =
      *shm::SealedSegment::Create("gradients", kBytes);
};

TEST_F(ShmShareGradientsTest, ARankOnADeviceGivesItsMemory) {
  auto peer = Connect(0);
  ASSERT_TRUE(peer->Register().ok());
  ASSERT_TRUE(peer->SendAttach(peer->MakeSegment()).ok());
  const auto attached = peer->Receive();
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_TRUE(attached->attach().shares_gradients());
  ASSERT_NO_FATAL_FAILURE(Offer(peer.get(), FakeJob::kDevice, kBytes, 2));
  const absl::Status taken = Refusal(peer.get());
  EXPECT_TRUE(taken.ok()) << taken;
  EXPECT_EQ(job_.rank(0).shared_gradient_bytes, kBytes);
  EXPECT_EQ(job_.rank(1).shared_gradient_bytes, 0u);
  // A refusal ends nothing.
  ASSERT_NO_FATAL_FAILURE(Offer(peer.get(), "another", kBytes, 2));
  const absl::Status refused = Refusal(peer.get());
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_NE(refused.message().find(FakeJob::kDevice), absl::string_view::npos);
  // It is given up without files.
  ASSERT_NO_FATAL_FAILURE(Offer(peer.get(), FakeJob::kDevice, 0, 0));
  EXPECT_TRUE(Refusal(peer.get()).ok());
  EXPECT_EQ(job_.rank(0).shared_gradient_bytes, 0u);
  EXPECT_TRUE(peer->Call(peer->Push(1)).status.ok());
}

TEST_F(ShmShareGradientsTest, MemoryWithoutItsFilesEndsTheSession) {
  struct Wrong {
    uint64_t bytes;
    size_t fds;
  };
  for (const Wrong& wrong :
       {Wrong{kBytes, 0}, Wrong{kBytes, 1}, Wrong{kBytes, 3}, Wrong{0, 2}}) {
    auto peer = Open(0);
    ASSERT_NO_FATAL_FAILURE(
        Offer(peer.get(), FakeJob::kDevice, wrong.bytes, wrong.fds));
    const absl::Status ended = peer->AwaitEnd();
    EXPECT_TRUE(absl::IsInvalidArgument(ended)) << ended;
    EXPECT_NE(ended.message().find("fds"), absl::string_view::npos) << ended;
    job_.AwaitAttached(0, false);
  }
  ExpectServes(0);
}

}  // namespace
}  // namespace optstate::transport
