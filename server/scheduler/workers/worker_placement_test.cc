#include "server/scheduler/workers/worker_placement.h"

#include <gmock/gmock.h>

#include <string>

#include "gtest/gtest.h"

namespace optstate::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Requests four processors of each of two nodes, of a machine with twice as
// many.
PlacementRequest TwoNodes(int workers) {
  PlacementRequest request;
  request.workers = workers;
  request.nodes = {{0, {0, 1, 2, 3}}, {1, {8, 9, 10, 11}}};
  request.online_cpus = 16;
  request.quota_cores = 8;
  return request;
}

std::vector<int> NodesOf(const WorkerPlacement& placement) {
  std::vector<int> nodes;
  for (const auto& seat : placement.seats) nodes.push_back(seat.node);
  return nodes;
}

TEST(WorkerPlacementTest, ACoreEachWhereTheyAreSetApart) {
  const WorkerPlacement placement = PlaceWorkers(TwoNodes(8));
  EXPECT_THAT(NodesOf(placement), ElementsAre(0, 0, 0, 0, 1, 1, 1, 1));
  EXPECT_THAT(placement.seats[0].cpus, IsEmpty());  // the caller
  EXPECT_THAT(placement.seats[1].cpus, ElementsAre(1));
  EXPECT_THAT(placement.seats[3].cpus, ElementsAre(3));
  EXPECT_THAT(placement.seats[4].cpus, ElementsAre(8));
  EXPECT_THAT(placement.seats[7].cpus, ElementsAre(11));
  EXPECT_TRUE(placement.several_nodes());
}

TEST(WorkerPlacementTest, OnlyTheNodeWhereOthersHaveTheSameCores) {
  PlacementRequest request = TwoNodes(8);
  request.online_cpus = 8;
  const WorkerPlacement placement = PlaceWorkers(request);
  EXPECT_THAT(placement.seats[3].cpus, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(placement.seats[4].cpus, ElementsAre(8, 9, 10, 11));
  request.pinning = Pinning::kAlways;
  EXPECT_THAT(PlaceWorkers(request).seats[4].cpus, ElementsAre(8));
}

// Workers are not bound: fixed processors would be the same for every engine.
TEST(WorkerPlacementTest, FewerThanCoresAreSpreadOverTheNodes) {
  const WorkerPlacement placement = PlaceWorkers(TwoNodes(3));
  EXPECT_THAT(NodesOf(placement), ElementsAre(0, 0, 1));
  EXPECT_THAT(placement.seats[1].cpus, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(placement.seats[2].cpus, ElementsAre(8, 9, 10, 11));
}

void ExpectUnbound(const PlacementRequest& request, const std::string& why) {
  const WorkerPlacement placement = PlaceWorkers(request);
  EXPECT_EQ(placement.seats.size(), static_cast<size_t>(request.workers));
  for (const auto& seat : placement.seats) EXPECT_THAT(seat.cpus, IsEmpty());
  EXPECT_FALSE(placement.several_nodes());
  EXPECT_THAT(placement.description, HasSubstr(why));
}

TEST(WorkerPlacementTest, Unbound) {
  PlacementRequest quota = TwoNodes(8);
  quota.quota_cores = 7;
  ExpectUnbound(quota, "a quota gives them 7 of 8 cores");
  quota.pinning = Pinning::kAlways;
  ExpectUnbound(quota, "a quota");
  ExpectUnbound(TwoNodes(9), "they share 8 cores");
  PlacementRequest never = TwoNodes(8);
  never.pinning = Pinning::kNever;
  ExpectUnbound(never, "the configuration");
  PlacementRequest whole_machine = TwoNodes(4);
  whole_machine.nodes = {{0, {0, 1, 2, 3}}};
  whole_machine.online_cpus = whole_machine.quota_cores = 4;
  ExpectUnbound(whole_machine, "not ours alone");
}

TEST(WorkerPlacementTest, HereThereIsASeatForEach) {
  EXPECT_EQ(PlaceWorkersHere(5, Pinning::kAuto).seats.size(), 5u);
  EXPECT_EQ(PlaceWorkersHere(1, Pinning::kNever).seats.size(), 1u);
}

}  // namespace
}  // namespace optstate::scheduler
