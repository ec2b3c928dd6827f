#include "proto/shm/ring.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "proto/shm/futex.h"
#include "proto/shm/sealed_segment.h"

namespace optstate::shm {
namespace {

// Both sides of one ring in plain memory, for tests that need no second
// mapping.
struct TestRing {
  RingSide producer_side = {};
  RingSide consumer_side = {};
  Submission entries[kRingEntries] = {};

  RingProducer<Submission> producer{&producer_side, &consumer_side, entries};
  RingConsumer<Submission> consumer{&consumer_side, &producer_side, entries};
};

// Makes an entry whose every field identifies it.
Submission EntryOf(uint64_t i) {
  Submission entry = {};
  entry.op = static_cast<uint16_t>(i);
  entry.request_id = i;
  entry.step = ~i;
  entry.begin = i * 3;
  entry.max_norm = static_cast<double>(i);
  return entry;
}

bool IsEntry(const Submission& entry, uint64_t i) {
  return entry.op == static_cast<uint16_t>(i) && entry.request_id == i &&
         entry.step == ~i && entry.begin == i * 3 &&
         entry.max_norm == static_cast<double>(i);
}

absl::StatusCode PushCode(TestRing& ring, uint64_t i) {
  return ring.producer.Push(EntryOf(i)).code();
}

absl::StatusCode TakeCode(TestRing& ring) {
  Submission entry;
  return ring.consumer.Take(&entry).status().code();
}

// Takes `count` entries and checks them, sleeping whenever there is none.
// Sleeps are unlimited: a lost wake-up hangs the test.
testing::AssertionResult Consume(RingConsumer<Submission>& consumer,
                                 uint64_t count, absl::Duration spin) {
  for (uint64_t i = 0; i < count;) {
    Submission entry;
    const absl::StatusOr<Poll> poll = consumer.Take(&entry);
    if (!poll.ok()) return testing::AssertionFailure() << poll.status();
    if (*poll == Poll::kEmpty) {
      consumer.Wait(spin, absl::InfiniteDuration());
      continue;
    }
    if (!IsEntry(entry, i)) return testing::AssertionFailure() << "entry " << i;
    consumer.Release();
    ++i;
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult Produce(RingProducer<Submission>& producer,
                                 uint64_t count) {
  for (uint64_t i = 0; i < count;) {
    const absl::Status status = producer.Push(EntryOf(i));
    if (status.ok()) {
      ++i;
    } else if (absl::IsResourceExhausted(status)) {
      std::this_thread::yield();
    } else {
      return testing::AssertionFailure() << status;
    }
  }
  return testing::AssertionSuccess();
}

TEST(RingTest, EmptyUntilPushed) {
  auto ring = std::make_unique<TestRing>();
  Submission entry;
  EXPECT_EQ(*ring->consumer.Take(&entry), Poll::kEmpty);
  ASSERT_TRUE(ring->producer.Push(EntryOf(5)).ok());
  EXPECT_EQ(ring->producer.tail(), 1u);
  ASSERT_EQ(*ring->consumer.Take(&entry), Poll::kEntry);
  EXPECT_TRUE(IsEntry(entry, 5));
  EXPECT_EQ(ring->consumer.head(), 0u);  // not yet released
  ring->consumer.Release();
  EXPECT_EQ(ring->consumer.head(), 1u);
  EXPECT_EQ(*ring->consumer.Take(&entry), Poll::kEmpty);
}

// Checks the words of the protocol as the peer's implementation reads them.
TEST(RingTest, SharedWordsAreTheDocumentedOnes) {
  auto ring = std::make_unique<TestRing>();
  for (uint32_t i = 1; i <= 3; ++i) {
    ASSERT_TRUE(ring->producer.Push(EntryOf(i)).ok());
    EXPECT_EQ(ring->producer_side.produced_tail, i);
    // Without the doorbell a sleeper that read tail just before would not wake
    // up.
    EXPECT_EQ(ring->producer_side.doorbell, i);
    EXPECT_TRUE(IsEntry(ring->entries[i - 1], i));
  }
  Submission entry;
  ASSERT_EQ(*ring->consumer.Take(&entry), Poll::kEntry);
  EXPECT_EQ(ring->consumer_side.consumed_head, 0u);
  ring->consumer.Release();
  EXPECT_EQ(ring->consumer_side.consumed_head, 1u);
  EXPECT_EQ(ring->consumer_side.waiting, 0u);
}

TEST(RingTest, ASlotIsTheProducersAgainOnlyAfterRelease) {
  auto ring = std::make_unique<TestRing>();
  for (uint64_t i = 0; i < kRingEntries; ++i) {
    ASSERT_TRUE(ring->producer.Push(EntryOf(i)).ok());
  }
  EXPECT_EQ(PushCode(*ring, 0), absl::StatusCode::kResourceExhausted);
  Submission entry;
  ASSERT_EQ(*ring->consumer.Take(&entry), Poll::kEntry);
  EXPECT_EQ(PushCode(*ring, 0), absl::StatusCode::kResourceExhausted);
  ring->consumer.Release();
  EXPECT_EQ(PushCode(*ring, kRingEntries), absl::StatusCode::kOk);
  EXPECT_EQ(PushCode(*ring, 0), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(
      Consume(ring->consumer, 0, absl::ZeroDuration()));  // nothing taken
  for (uint64_t i = 1; i <= kRingEntries; ++i) {
    ASSERT_EQ(*ring->consumer.Take(&entry), Poll::kEntry);
    EXPECT_TRUE(IsEntry(entry, i));
    ring->consumer.Release();
  }
}

TEST(RingTest, EntriesInUseAreThoseThatWereNotReleased) {
  TestRing ring;
  const auto in_use = [&ring] {
    return EntriesInUse(ring.producer_side, ring.consumer_side);
  };
  EXPECT_EQ(in_use(), 0u);
  for (uint64_t i = 0; i < 3; ++i) {
    ASSERT_EQ(PushCode(ring, i), absl::StatusCode::kOk);
  }
  EXPECT_EQ(in_use(), 3u);
  ASSERT_EQ(TakeCode(ring), absl::StatusCode::kOk);
  EXPECT_EQ(in_use(), 3u);
  ring.consumer.Release();
  EXPECT_EQ(in_use(), 2u);
  // Either side may be a peer's.
  ring.producer_side.produced_tail = UINT64_MAX;
  EXPECT_EQ(in_use(), uint64_t{kRingEntries});
  ring.producer_side.produced_tail = 0;
  EXPECT_EQ(in_use(), 0u);
}

TEST(RingTest, ImpossibleHeadIsDataLoss) {
  auto ring = std::make_unique<TestRing>();
  ASSERT_TRUE(ring->producer.Push(EntryOf(0)).ok());
  for (uint64_t head : {uint64_t{2}, uint64_t{1} << 63, ~uint64_t{0}}) {
    ring->consumer_side.consumed_head = head;
    EXPECT_EQ(PushCode(*ring, 1), absl::StatusCode::kDataLoss) << head;
  }
  EXPECT_EQ(ring->producer.tail(), 1u);  // nothing was published
  ring->consumer_side.consumed_head = 1;
  EXPECT_EQ(PushCode(*ring, 1), absl::StatusCode::kOk);
}

TEST(RingTest, HeadFurtherBehindThanARingIsDataLoss) {
  auto ring = std::make_unique<TestRing>();
  for (uint64_t i = 0; i < 3 * kRingEntries; ++i) {
    ASSERT_TRUE(ring->producer.Push(EntryOf(i)).ok());
    ring->consumer_side.consumed_head = i + 1;
  }
  ring->consumer_side.consumed_head = 0;
  EXPECT_EQ(PushCode(*ring, 0), absl::StatusCode::kDataLoss);
}

TEST(RingTest, ImpossibleTailIsDataLoss) {
  auto ring = std::make_unique<TestRing>();
  for (uint64_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(ring->producer.Push(EntryOf(i)).ok());
  }
  ASSERT_TRUE(Consume(ring->consumer, 2, absl::ZeroDuration()));
  // The tail went backwards, or is more than a ring ahead.
  for (uint64_t tail : {uint64_t{1}, uint64_t{0}, uint64_t{3} + kRingEntries,
                        uint64_t{1} << 63, ~uint64_t{0}}) {
    ring->producer_side.produced_tail = tail;
    EXPECT_EQ(TakeCode(*ring), absl::StatusCode::kDataLoss) << tail;
    // The consumer does not wait on such a tail either.
    ring->consumer.Wait(absl::ZeroDuration(), absl::InfiniteDuration());
  }
  ring->producer_side.produced_tail = 2 + kRingEntries;
  EXPECT_EQ(TakeCode(*ring), absl::StatusCode::kOk);
}

TEST(RingTest, WaitEndsAfterItsTime) {
  auto ring = std::make_unique<TestRing>();
  ring->consumer.Wait(absl::Milliseconds(1), absl::Milliseconds(5));
  EXPECT_EQ(ring->consumer_side.waiting, 0u);
  ring->consumer.Wait(absl::ZeroDuration(), absl::ZeroDuration());
}

TEST(RingTest, WaitDoesNotSleepOverAnEntry) {
  auto ring = std::make_unique<TestRing>();
  ASSERT_TRUE(ring->producer.Push(EntryOf(0)).ok());
  ring->consumer.Wait(absl::ZeroDuration(), absl::InfiniteDuration());
  ring->consumer.Wait(absl::InfiniteDuration(), absl::InfiniteDuration());
}

TEST(RingTest, AMillionEntriesBetweenThreads) {
  constexpr uint64_t kCount = 1000000;
  auto ring = std::make_unique<TestRing>();
  std::thread producer(
      [&ring] { EXPECT_TRUE(Produce(ring->producer, kCount)); });
  EXPECT_TRUE(Consume(ring->consumer, kCount, absl::ZeroDuration()));
  producer.join();
}

// One entry goes there, one comes back, and both sides sleep in between: each
// turn is a chance to lose a wake-up, and a lost one hangs the test.
TEST(RingTest, NoWakeUpIsLost) {
  constexpr uint64_t kTurns = 20000;
  auto there = std::make_unique<TestRing>();
  auto back = std::make_unique<TestRing>();
  const auto turn = [](RingConsumer<Submission>& consumer, uint64_t i) {
    Submission entry;
    while (*consumer.Take(&entry) == Poll::kEmpty) {
      // Every second wait has a short spin, which ends at varying moments.
      consumer.Wait(absl::Microseconds(i % 2), absl::InfiniteDuration());
    }
    EXPECT_TRUE(IsEntry(entry, i));
    consumer.Release();
  };
  std::thread echo([&] {
    for (uint64_t i = 0; i < kTurns; ++i) {
      turn(there->consumer, i);
      EXPECT_TRUE(back->producer.Push(EntryOf(i)).ok());
    }
  });
  for (uint64_t i = 0; i < kTurns; ++i) {
    EXPECT_TRUE(there->producer.Push(EntryOf(i)).ok());
    turn(back->consumer, i);
  }
  echo.join();
}

// Each sleep gets one interrupt, at varying moments before and within it: a
// lost interrupt hangs the test.
TEST(RingTest, InterruptEndsASleepWithoutEnd) {
  constexpr int kRounds = 5000;
  auto ring = std::make_unique<TestRing>();
  std::atomic<int> rounds = 0;
  std::thread sleeper([&] {
    while (rounds < kRounds) {
      ring->consumer.Wait(absl::ZeroDuration(), absl::InfiniteDuration());
      ++rounds;
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    ring->consumer.Interrupt();
    while (rounds <= i) std::this_thread::yield();
  }
  sleeper.join();
}

// This moment hardly ever comes by itself: the sleeper has checked, but is not
// in the kernel yet. The test plays it step by step.
TEST(RingTest, AnInterruptBetweenLookAndSleepIsNotLost) {
  for (int round = 0; round < 100; ++round) {
    auto ring = std::make_unique<TestRing>();
    ring->consumer_side.waiting = 1;
    std::thread interrupter([&ring] { ring->consumer.Interrupt(); });
    while (ring->consumer_side.interrupted == 0) std::this_thread::yield();
    std::this_thread::yield();  // a first wake-up finds no sleeper
    FutexWait(ring->producer_side.doorbell, 0, absl::InfiniteDuration());
    ring->consumer_side.waiting = 0;
    interrupter.join();
  }
}

TEST(RingTest, AnInterruptBeforeTheWaitEndsThatOneAlone) {
  auto ring = std::make_unique<TestRing>();
  for (absl::Duration spin : {absl::ZeroDuration(), absl::InfiniteDuration()}) {
    ring->consumer.Interrupt();
    EXPECT_EQ(ring->consumer_side.interrupted, 1u);
    ring->consumer.Wait(spin, absl::InfiniteDuration());
    EXPECT_EQ(ring->consumer_side.interrupted, 0u);
  }
}

TEST(RingTest, ASignalDoesNotLoseEntries) {
  struct sigaction action = {};
  action.sa_handler = [](int) {};
  struct sigaction before;
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  auto ring = std::make_unique<TestRing>();
  std::atomic<bool> done = false;
  std::thread consumer([&] {
    EXPECT_TRUE(Consume(ring->consumer, 1000, absl::ZeroDuration()));
    done = true;
  });
  for (uint64_t i = 0; i < 1000; ++i) {
    pthread_kill(consumer.native_handle(), SIGUSR1);
    ASSERT_TRUE(ring->producer.Push(EntryOf(i)).ok());
  }
  while (!done) std::this_thread::yield();
  consumer.join();
  sigaction(SIGUSR1, &before, nullptr);
}

// A client and an engine as in use: two processes, each with its own sealed
// segment and a read-only view of the other's.
struct Mapped {
  SealedSegment mine;
  PeerSegment peer;
};

constexpr uint64_t kSegmentBytes =
    kPageBytes + kRingEntries * sizeof(Submission);

RingSide* MySide(const Mapped& m) {
  return std::launder(reinterpret_cast<RingSide*>(m.mine.data()));
}
const RingSide* PeerSide(const Mapped& m) {
  return std::launder(reinterpret_cast<const RingSide*>(m.peer.data()));
}

RingProducer<Submission> ProducerOf(const Mapped& m) {
  return {MySide(m), PeerSide(m),
          reinterpret_cast<Submission*>(m.mine.data() + kPageBytes)};
}
RingConsumer<Submission> ConsumerOf(const Mapped& m) {
  return {MySide(m), PeerSide(m),
          reinterpret_cast<const Submission*>(m.peer.data() + kPageBytes)};
}

Mapped Join(SealedSegment mine, int peer_fd) {
  auto peer = PeerSegment::Map(UniqueFd(fcntl(peer_fd, F_DUPFD_CLOEXEC, 0)),
                               kSegmentBytes);
  EXPECT_TRUE(peer.ok()) << peer.status();
  return {.mine = std::move(mine), .peer = *std::move(peer)};
}

// Echoes `count` entries; returns the exit status of the child.
int Echo(const Mapped& m, uint64_t count) {
  RingProducer<Submission> producer = ProducerOf(m);
  RingConsumer<Submission> consumer = ConsumerOf(m);
  for (uint64_t i = 0; i < count;) {
    Submission entry;
    const absl::StatusOr<Poll> poll = consumer.Take(&entry);
    if (!poll.ok()) return 1;
    if (*poll == Poll::kEmpty) {
      consumer.Wait(absl::ZeroDuration(), absl::InfiniteDuration());
      continue;
    }
    consumer.Release();
    if (!producer.Push(entry).ok()) return 2;
    ++i;
  }
  return 0;
}

TEST(RingTest, AcrossProcessesOverSealedSegments) {
  constexpr uint64_t kCount = 100000;
  // The number is smaller than either ring, so that neither side meets a full
  // one.
  constexpr uint64_t kInFlightMax = kRingEntries / 2;
  auto client = SealedSegment::Create("client", kSegmentBytes);
  auto engine = SealedSegment::Create("engine", kSegmentBytes);
  ASSERT_TRUE(client.ok() && engine.ok());
  const int client_fd = client->fd();
  const int engine_fd = engine->fd();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    _exit(Echo(Join(*std::move(engine), client_fd), kCount));
  }
  const Mapped m = Join(*std::move(client), engine_fd);
  RingProducer<Submission> producer = ProducerOf(m);
  RingConsumer<Submission> consumer = ConsumerOf(m);
  uint64_t pushed = 0;
  for (uint64_t taken = 0; taken < kCount;) {
    while (pushed < kCount && pushed - taken < kInFlightMax) {
      ASSERT_TRUE(producer.Push(EntryOf(pushed)).ok());
      ++pushed;
    }
    Submission entry;
    const absl::StatusOr<Poll> poll = consumer.Take(&entry);
    ASSERT_TRUE(poll.ok()) << poll.status();
    if (*poll == Poll::kEmpty) {
      consumer.Wait(absl::ZeroDuration(), absl::InfiniteDuration());
      continue;
    }
    ASSERT_TRUE(IsEntry(entry, taken));
    consumer.Release();
    ++taken;
  }
  int exit_status = 0;
  ASSERT_EQ(waitpid(child, &exit_status, 0), child);
  EXPECT_EQ(exit_status, 0);
}

// Waiting on the peer's doorbell needs no more than a read-only mapping.
TEST(RingTest, InterruptEndsASleepOnAPeersSegment) {
  auto mine = SealedSegment::Create("mine", kSegmentBytes);
  auto peer = SealedSegment::Create("peer", kSegmentBytes);
  ASSERT_TRUE(mine.ok() && peer.ok());
  const Mapped m = Join(*std::move(mine), peer->fd());
  RingConsumer<Submission> consumer = ConsumerOf(m);
  std::thread sleeper([&consumer] {
    consumer.Wait(absl::ZeroDuration(), absl::InfiniteDuration());
  });
  consumer.Interrupt();
  sleeper.join();
}

}  // namespace
}  // namespace optstate::shm
