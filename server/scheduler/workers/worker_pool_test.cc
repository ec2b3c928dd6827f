#include "server/scheduler/workers/worker_pool.h"

#include <sched.h>

#include <atomic>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"
#include "server/observe/trace_recorder.h"

namespace optstate::scheduler {
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

// The caller of the first index stays in it until all others are done: then
// its own share was done by others, and they did their own before that.
TEST(WorkerPoolTest, OthersTakeWhatAnOwnerDoesNotGetTo) {
  WorkerPool pool(3, false);
  std::atomic<size_t> done{0};
  constexpr size_t kCount = 30;
  pool.ParallelFor(kCount, [&](size_t i) {
    // This would never end if the waiting thread had to do the rest of its
    // share.
    while (i == 0 && done < kCount - 1) std::this_thread::yield();
    ++done;
  });
  EXPECT_EQ(done, kCount);
}

// Each participant waits in its first index for the others' firsts, so all are
// awake; then the first index that each takes is one of its own share.
TEST(WorkerPoolTest, EveryoneBeginsWithItsOwnShare) {
  constexpr size_t kParticipants = 3;
  WorkerPool pool(kParticipants, false);
  for (const IndexRange range :
       {IndexRange{0, 30, 30}, IndexRange{5, 27, 30}, IndexRange{0, 3, 3}}) {
    std::atomic<size_t> begun{0};
    std::vector<size_t> firsts(kParticipants, SIZE_MAX);
    pool.ParallelFor(range, [&](size_t i) {
      size_t& first =
          firsts[static_cast<size_t>(WorkerPool::CurrentParticipant())];
      if (first != SIZE_MAX) return;
      first = i;
      ++begun;
      while (begun < kParticipants) std::this_thread::yield();
    });
    for (size_t p = 0; p < kParticipants; ++p) {
      const IndexRange own = WorkerPool::ShareOf(p, kParticipants, range.total);
      EXPECT_EQ(firsts[p], std::max(own.begin, range.begin)) << p;
    }
  }
}

TEST(WorkerPoolTest, PartsOfTheIndices) {
  WorkerPool pool(4, true);
  for (size_t begin = 0; begin < 20; ++begin) {
    for (size_t end = begin; end <= 20; ++end) {
      std::vector<int> calls(20, 0);
      pool.ParallelFor({begin, end, 20}, [&](size_t i) { ++calls[i]; });
      for (size_t i = 0; i < 20; ++i) {
        EXPECT_EQ(calls[i], i >= begin && i < end ? 1 : 0);
      }
    }
  }
}

// Each participant waits in its index for the others, so all have one.
TEST(WorkerPoolTest, ATraceHasALaneForEachParticipant) {
  constexpr size_t kParticipants = 3;
  observe::TraceRecorder recorder;
  WorkerPool pool(kParticipants, false, {}, &recorder);
  const auto run = [&](const char* span) {
    std::atomic<size_t> begun{0};
    pool.ParallelFor(
        {0, kParticipants, kParticipants},
        [&](size_t) {
          ++begun;
          while (begun < kParticipants) std::this_thread::yield();
        },
        span);
  };
  run("staging");  // no trace is under way
  ASSERT_TRUE(recorder.Begin(1).ok());
  recorder.Arm();
  recorder.BeginStep(7);
  run("update");
  run(nullptr);
  pool.ParallelFor(
      {0, 0, 0}, [](size_t) {}, "staging");
  pool.ParallelFor(
      {0, 1, 1},
      [&](size_t) { const observe::ScopedSpan span(pool.trace(), "publish"); },
      nullptr);
  v1::TraceChunk chunk;
  EXPECT_FALSE(recorder.Take(&chunk));
  recorder.Disarm();
  recorder.End();
  std::multiset<std::string> found;
  for (const v1::TraceSpan& span : chunk.spans()) {
    const v1::TraceLane& lane = chunk.lanes(static_cast<int>(span.lane()));
    EXPECT_EQ(lane.group(), "workers");
    EXPECT_EQ(span.step(), 7u);
    found.insert(lane.name() + " " + span.name());
  }
  EXPECT_EQ(found,
            (std::multiset<std::string>{"worker 0 publish", "worker 0 update",
                                        "worker 1 update", "worker 2 update"}));
}

// A participant that has done its own share takes from its node before others.
TEST(WorkerPoolTest, NeighboursComeFirst) {
  WorkerPlacement placement;
  for (const int node : {0, 0, 1, 1}) placement.seats.push_back({node, {}});
  WorkerPool pool(4, false, placement);
  constexpr size_t kEach = 10;
  // All but participant 3 wait in their first index until it has done
  // the rest.
  std::atomic<size_t> begun{0};
  std::atomic<bool> over{false};
  std::vector<size_t> order;
  pool.ParallelFor(4 * kEach, [&](size_t i) {
    ++begun;
    if (WorkerPool::CurrentParticipant() != 3) {
      while (!over) std::this_thread::yield();
      return;
    }
    while (begun < 4) std::this_thread::yield();
    order.push_back(i);
    over = order.size() == 4 * kEach - 3;
  });
  ASSERT_EQ(order.size(), 4 * kEach - 3);
  for (size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(order[i] >= 2 * kEach, i < 2 * kEach - 1) << i;
  }
}

TEST(WorkerPoolTest, ThreadsAreWhereTheirSeatsAre) {
  const std::vector<int> cpus = AllowedCpus();
  WorkerPlacement placement;
  placement.seats.resize(2);
  placement.seats[1].cpus = {cpus.back()};
  WorkerPool pool(2, false, placement);
  std::vector<std::vector<int>> seen(2);
  std::atomic<int> here{0};
  pool.ParallelFor(2, [&](size_t) {
    seen[static_cast<size_t>(WorkerPool::CurrentParticipant())] = AllowedCpus();
    ++here;
    while (here < 2) std::this_thread::yield();
  });
  EXPECT_EQ(seen[0], cpus);
  EXPECT_EQ(seen[1], placement.seats[1].cpus);
}

// The others do their own indices, and those of the caller, which comes back
// when all are done.
TEST(WorkerPoolTest, ThreadsWorkWhileTheCallerDoesSomethingElse) {
  for (const bool spin : {false, true}) {
    WorkerPool pool(4, spin);
    for (int i = 0; i < 20; ++i) {
      std::atomic<size_t> calls{0};
      std::atomic<bool> is_callers{false};
      const auto body = [&](size_t) {
        if (WorkerPool::CurrentParticipant() == 0) is_callers = true;
        ++calls;
      };
      pool.Start({0, 100, 100}, body);
      while (calls < 100) std::this_thread::yield();
      pool.Finish();
      EXPECT_EQ(calls, 100u);
      EXPECT_FALSE(is_callers);
      // One index alone waits for the caller.
      pool.Start({7, 8, 100}, body);
      pool.Finish();
      EXPECT_EQ(calls, 101u);
      EXPECT_TRUE(is_callers);
    }
  }
}

// A core may have been taken from the cpuset meanwhile.
TEST(WorkerPoolTest, ASeatThatIsNotThereIsNoHindrance) {
  WorkerPlacement placement;
  placement.seats.resize(2);
  placement.seats[1].cpus = {60000};
  WorkerPool pool(2, false, placement);
  std::atomic<int> calls{0};
  pool.ParallelFor(10, [&](size_t) { ++calls; });
  EXPECT_EQ(calls, 10);
}

// Else this test does not end.
TEST(WorkerPoolTest, StopsWithoutHavingWorked) {
  for (const bool spin : {false, true}) {
    const WorkerPool pool(16, spin);
    EXPECT_EQ(pool.participants(), 16);
  }
}

}  // namespace
}  // namespace optstate::scheduler
