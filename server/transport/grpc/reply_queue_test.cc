#include "server/transport/grpc/reply_queue.h"

#include <string>
#include <thread>

#include "gtest/gtest.h"

namespace optstate::transport {
namespace {

constexpr size_t kBytesMax = 1 << 20;

v1::SessionReply Reply(uint64_t request_id) {
  v1::SessionReply reply;
  reply.set_request_id(request_id);
  return reply;
}

TEST(ReplyQueueTest, KeepsOrder) {
  ReplyQueue queue(3, kBytesMax);
  for (uint64_t id = 1; id <= 3; ++id) {
    ASSERT_TRUE(queue.Reserve());
    queue.Push(Reply(id));
  }
  for (uint64_t id = 1; id <= 3; ++id) {
    EXPECT_EQ(queue.Pop()->request_id(), id);
  }
}

TEST(ReplyQueueTest, StaysBoundedBetweenThreads) {
  constexpr uint64_t kCount = 10'000;
  ReplyQueue queue(2, kBytesMax);
  std::thread reader([&] {
    for (uint64_t id = 1; id <= kCount; ++id) {
      ASSERT_TRUE(queue.Reserve());
      queue.Push(Reply(id));
    }
    queue.Close();
  });
  uint64_t last = 0;
  while (auto reply = queue.Pop()) {
    EXPECT_EQ(reply->request_id(), last + 1);
    last = reply->request_id();
  }
  EXPECT_EQ(last, kCount);
  reader.join();
}

TEST(ReplyQueueTest, WhatIsOfferedTakesNobodysRoom) {
  ReplyQueue queue(2, kBytesMax);
  ASSERT_TRUE(queue.Reserve());
  queue.Offer(Reply(1));
  queue.Offer(Reply(2));  // the last place is reserved
  queue.Push(Reply(3));
  EXPECT_EQ(queue.Pop()->request_id(), 1u);
  EXPECT_EQ(queue.Pop()->request_id(), 3u);
  queue.Close();
  queue.Offer(Reply(4));
  EXPECT_FALSE(queue.Pop().has_value());
}

TEST(ReplyQueueTest, WhatIsBeingWrittenTakesRoom) {
  ReplyQueue queue(1, kBytesMax);
  ASSERT_TRUE(queue.Reserve());
  queue.Push(Reply(1));
  EXPECT_EQ(queue.Pop()->request_id(), 1u);
  // The writer has not come back, so there is no room until it is closed.
  std::thread reader([&] { EXPECT_FALSE(queue.Reserve()); });
  queue.Close();
  reader.join();
  EXPECT_FALSE(queue.Pop().has_value());
}

TEST(ReplyQueueTest, TheLengthHasTheReplyThatIsBeingWritten) {
  ReplyQueue queue(4, kBytesMax);
  EXPECT_EQ(queue.length(), 0u);
  for (uint64_t id = 1; id <= 2; ++id) {
    ASSERT_TRUE(queue.Reserve());
    EXPECT_EQ(queue.length(), id - 1);  // nothing is queued yet
    queue.Push(Reply(id));
  }
  EXPECT_EQ(queue.length(), 2u);
  EXPECT_EQ(queue.Pop()->request_id(), 1u);
  EXPECT_EQ(queue.length(), 2u);
  EXPECT_EQ(queue.Pop()->request_id(), 2u);
  EXPECT_EQ(queue.length(), 1u);
  EXPECT_FALSE(queue.Pop(absl::InfinitePast()).has_value());
  EXPECT_EQ(queue.length(), 0u);
  ASSERT_TRUE(queue.Reserve());
  queue.Push(Reply(3));
  queue.Abandon();
  EXPECT_EQ(queue.length(), 0u);
}

TEST(ReplyQueueTest, LargeRepliesTakeRoomByTheirBytes) {
  ReplyQueue queue(100, kBytesMax);
  v1::SessionReply large = Reply(1);
  large.mutable_fetch()->set_data(std::string(kBytesMax, 'x'));
  ASSERT_TRUE(queue.Reserve());
  ASSERT_TRUE(queue.Reserve());
  queue.Push(large);
  queue.Push(Reply(2));  // its room was reserved before
  std::thread reader([&] {
    EXPECT_TRUE(queue.Reserve());
    queue.Push(Reply(3));
  });
  for (uint64_t id = 1; id <= 3; ++id) {
    EXPECT_EQ(queue.Pop()->request_id(), id);
  }
  reader.join();
}

TEST(ReplyQueueTest, AClosedQueueDropsLateReplies) {
  ReplyQueue queue(4, kBytesMax);
  ASSERT_TRUE(queue.Reserve());
  ASSERT_TRUE(queue.Reserve());
  queue.Push(Reply(1));
  queue.Close();
  queue.Push(Reply(2));
  EXPECT_EQ(queue.Pop()->request_id(), 1u);
  EXPECT_FALSE(queue.Pop().has_value());
  EXPECT_FALSE(queue.Reserve());
}

TEST(ReplyQueueTest, AnAbandonedQueueIsEmpty) {
  ReplyQueue queue(4, kBytesMax);
  ASSERT_TRUE(queue.Reserve());
  queue.Push(Reply(1));
  queue.Abandon();
  EXPECT_FALSE(queue.Pop().has_value());
}

}  // namespace
}  // namespace optstate::transport
