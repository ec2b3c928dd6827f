// The parts of the simulated world: time, order, the network, the all-gather.

#include "tests/simulation/world.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/simulation/collective.h"
#include "tests/simulation/simulated_network.h"

namespace optstate::simulation {
namespace {

constexpr DrawnTime kMillisecond = {absl::Milliseconds(1),
                                    absl::Milliseconds(1)};

// A model in which every message and every local hop takes 1 ms.
Model Even() {
  Model model;
  model.network = kMillisecond;
  model.local = kMillisecond;
  model.network_bytes_per_s = 1e15;
  model.loss_probability = 0;
  return model;
}

TEST(EventQueueTest, EventsComeInTheOrderOfTimeThenOfTheirAddition) {
  World world(1, Even());
  std::vector<int> order;
  const absl::Time begin = world.queue.now();
  world.queue.After(absl::Seconds(2), {}, [&] { order.push_back(3); });
  world.queue.After(absl::Seconds(1), {}, [&] {
    order.push_back(1);
    world.queue.After(absl::Seconds(1), {}, [&] { order.push_back(4); });
  });
  world.queue.After(absl::Seconds(1), {}, [&] { order.push_back(2); });
  ASSERT_TRUE(
      world.queue
          .RunUntil(begin + absl::Seconds(9), [&] { return order.size() == 4; })
          .ok());
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(world.queue.now() - begin, absl::Seconds(2));
  EXPECT_EQ(world.queue.events_run(), 4u);
}

TEST(EventQueueTest, WhatNeverComesIsAnError) {
  World world(1, Even());
  const absl::Time begin = world.queue.now();
  const auto never = [] { return false; };
  EXPECT_TRUE(absl::IsFailedPrecondition(
      world.queue.RunUntil(absl::InfiniteFuture(), never)));
  world.queue.After(absl::Seconds(5), {}, [] {});
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      world.queue.RunUntil(begin + absl::Seconds(1), never)));
  EXPECT_EQ(world.queue.now(), begin);
}

TEST(EventQueueTest, ATraceTellsWhatHappenedWhere) {
  const auto hash_of = [](EventTag tag) {
    World world(1, Even());
    world.queue.After(absl::Seconds(1), tag, [] {});
    EXPECT_TRUE(world.queue.RunFor(absl::Seconds(2)).ok());
    return world.trace.hash();
  };
  const uint64_t hash = hash_of({.kind = EventKind::kRank, .node = 1});
  EXPECT_EQ(hash, hash_of({.kind = EventKind::kRank, .node = 1}));
  EXPECT_NE(hash, hash_of({.kind = EventKind::kRank, .node = 2}));
  EXPECT_NE(hash, hash_of({.kind = EventKind::kHello, .node = 1}));
}

TEST(SimulatedNetworkTest, LostMessagesComeLater) {
  Model model = Even();
  model.loss_probability = 1;  // until the last attempt
  World world(1, model);
  SimulatedNetwork network(&world, 2);
  const absl::Time begin = world.queue.now();
  absl::Duration took;
  network.Send(0, 1, 8, [&] { took = world.queue.now() - begin; });
  ASSERT_TRUE(world.queue.RunFor(absl::Minutes(1)).ok());
  EXPECT_GT(took, model.retransmission);
  EXPECT_GT(network.counts().sent_again, 0u);
}

TEST(SimulatedNetworkTest, APartitionHoldsWhatCrossesIt) {
  World world(1, Even());
  SimulatedNetwork network(&world, 4);
  const absl::Time begin = world.queue.now();
  network.Part({0, 1}, absl::Seconds(3));
  absl::Duration within;
  absl::Duration across;
  network.Send(0, 1, 8, [&] { within = world.queue.now() - begin; });
  network.Send(2, 1, 8, [&] { across = world.queue.now() - begin; });
  ASSERT_TRUE(world.queue.RunFor(absl::Minutes(1)).ok());
  EXPECT_GT(within, absl::ZeroDuration());
  EXPECT_LT(within, absl::Milliseconds(2));
  EXPECT_GT(across, absl::Seconds(3));
  EXPECT_EQ(network.counts().held, 1u);
}

TEST(SimulatedNetworkTest, NothingReachesALostNode) {
  World world(1, Even());
  SimulatedNetwork network(&world, 2);
  bool arrived = false;
  network.Send(0, 1, 8, [&] { arrived = true; });
  network.Fail(1);
  ASSERT_TRUE(world.queue.RunFor(absl::Minutes(1)).ok());
  EXPECT_FALSE(arrived);
  EXPECT_EQ(network.counts().undelivered, 1u);
}

Contribution VoteOf(uint64_t digest) {
  Contribution contribution;
  contribution.vote = NodeStep{.step = 1, .digest = digest};
  return contribution;
}

TEST(CollectiveTest, EveryRankGetsWhatAllHaveBrought) {
  constexpr uint32_t kNodes = 7;
  constexpr uint32_t kRanks = 3;
  for (const bool differ : {false, true}) {
    World world(1, Even());
    SimulatedNetwork network(&world, kNodes);
    Collective group(&world, &network, {0, 1, 2, 3, 4, 5, 6}, kRanks,
                     [](uint32_t /*member*/) { FAIL() << "nobody ends"; });
    uint32_t done = 0;
    for (uint32_t node = 0; node < kNodes; ++node) {
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const bool is_last = node + 1 == kNodes && rank + 1 == kRanks;
        group.Gather(node, rank, VoteOf(differ && is_last ? 6 : 5),
                     [&](const Round& round) {
                       ++done;
                       EXPECT_EQ(round.verdict(),
                                 differ ? Verdict::kAbort : Verdict::kCommit);
                     });
      }
    }
    ASSERT_TRUE(world.queue.RunFor(absl::Seconds(1)).ok());
    EXPECT_EQ(done, kNodes * kRanks);
    EXPECT_EQ(group.vote_rounds(), 1u);
  }
}

TEST(CollectiveTest, NobodyGoesOnBeforeAllAreThere) {
  World world(1, Even());
  SimulatedNetwork network(&world, 2);
  Collective group(&world, &network, {0, 1}, /*ranks=*/1, [](uint32_t) {});
  uint32_t done = 0;
  group.Gather(0, 0, VoteOf(5), [&](const Round&) { ++done; });
  ASSERT_TRUE(world.queue.RunFor(absl::Hours(1)).ok());
  EXPECT_EQ(done, 0u);
  group.Gather(1, 0, VoteOf(5), [&](const Round&) { ++done; });
  ASSERT_TRUE(world.queue.RunFor(absl::Seconds(1)).ok());
  EXPECT_EQ(done, 2u);
}

TEST(CollectiveTest, TheEndOfANodeReachesItsNeighbours) {
  World world(1, Even());
  SimulatedNetwork network(&world, 5);
  std::vector<uint32_t> noticed;
  Collective group(&world, &network, {0, 1, 2, 3, 4}, /*ranks=*/1,
                   [&](uint32_t member) { noticed.push_back(member); });
  group.End(1, kMillisecond);
  ASSERT_TRUE(world.queue.RunFor(absl::Seconds(1)).ok());
  EXPECT_EQ(noticed, (std::vector<uint32_t>{3, 4, 0}));
  EXPECT_TRUE(group.has_ended(1));
}

}  // namespace
}  // namespace optstate::simulation
