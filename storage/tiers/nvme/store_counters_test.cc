#include "storage/tiers/nvme/store_counters.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace optstate::nvme {
namespace {

// Threads that wait at the same time wait once, and a wait that is under way
// counts as far as it has come.
TEST(StoreCountersTest, WaitsThatOverlapCountOnce) {
  StoreCounters counters;
  EXPECT_EQ(counters.waited_ns(), 0u);
  counters.BeginWait();
  while (counters.waited_ns() == 0) {
  }
  counters.BeginWait();
  counters.EndWait();
  const uint64_t of_both_ns = counters.waited_ns();
  while (counters.waited_ns() == of_both_ns) {
  }
  counters.EndWait();
  const uint64_t waited_ns = counters.waited_ns();
  EXPECT_GT(waited_ns, of_both_ns);
  EXPECT_EQ(counters.waited_ns(), waited_ns);
  counters.OnPass();
  EXPECT_EQ(counters.all().last_pass.waited_ns, waited_ns);
  EXPECT_LE(waited_ns, counters.all().last_pass.elapsed_ns);
  counters.OnPass();
  EXPECT_EQ(counters.all().last_pass.waited_ns, 0u);
  EXPECT_EQ(counters.waited_ns(), waited_ns);
}

}  // namespace
}  // namespace optstate::nvme
