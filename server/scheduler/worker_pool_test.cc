#include "server/scheduler/worker_pool.h"

#include <atomic>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"

namespace optstate {
namespace {

TEST(WorkerPoolTest, EveryIndexOnceWhateverTheNumbers) {
  for (const int participants : {1, 2, 3, 8}) {
    for (const bool spin : {false, true}) {
      WorkerPool pool(participants, spin);
      EXPECT_EQ(pool.participants(), participants);
      for (const size_t count : {0, 1, 2, 3, 7, 100, 1000}) {
        std::vector<int> calls(count, 0);  // not atomic: TSan sees a double
        pool.ParallelFor(count, [&](size_t i) { ++calls[i]; });
        EXPECT_EQ(calls, std::vector<int>(count, 1));
      }
    }
  }
}

// Calls follow each other faster than threads wake, so that late ones meet a
// call other than the one which woke them.
TEST(WorkerPoolTest, ManyShortCalls) {
  WorkerPool pool(4, true);
  std::vector<uint64_t> sums(16, 0);
  for (uint64_t call = 0; call < 20000; ++call) {
    const size_t count = 1 + call % sums.size();
    pool.ParallelFor(count, [&](size_t i) { sums[i] += call; });
  }
  uint64_t expected = 0;
  for (uint64_t call = 0; call < 20000; ++call) {
    expected += call * (1 + call % sums.size());
  }
  EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), uint64_t{0}), expected);
}

TEST(WorkerPoolTest, WorkIsSharedWhenTheCallerIsBusy) {
  WorkerPool pool(2, false);
  // Each of two indices waits for the other: one thread alone would not end.
  std::atomic<int> here{0};
  pool.ParallelFor(2, [&](size_t) {
    ++here;
    here.notify_all();
    for (int seen = here; seen != 2; seen = here) here.wait(seen);
  });
  EXPECT_EQ(here, 2);
}

TEST(WorkerPoolTest, EachThreadIsAnotherParticipant) {
  WorkerPool pool(2, false);
  std::vector<int> participants(2, -1);
  std::atomic<int> here{0};
  pool.ParallelFor(2, [&](size_t i) {
    participants[i] = WorkerPool::CurrentParticipant();
    ++here;
    here.notify_all();
    for (int seen = here; seen != 2; seen = here) here.wait(seen);
  });
  EXPECT_EQ(participants[0] + participants[1], 1);
  EXPECT_EQ(participants[0] * participants[1], 0);
}

TEST(WorkerPoolTest, StopsWithoutHavingWorked) { WorkerPool pool(16, true); }

}  // namespace
}  // namespace optstate
