// Measures the rings against the machine's own means, in the same run.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "benchmark/benchmark.h"
#include "proto/shm/futex.h"
#include "proto/shm/ring.h"
#include "proto/shm/sealed_segment.h"
#include "proto/shm/segment_layout.h"

namespace optstate::shm {
namespace {

template <typename T>
T ValueOrDie(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::cerr << value.status() << std::endl;
  std::abort();
}

void CheckOk(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << std::endl;
  std::abort();
}

double NowSeconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Binds the process to the nth available core, or to the last one if there are
// fewer. Unbound, Linux puts two partners sometimes on one core and sometimes
// on two, where a wake takes several times as long: chance would decide a
// ratio.
void BindToCore(int nth) {
  static const std::vector<int> cores = [] {
    cpu_set_t set;
    std::vector<int> result;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) std::abort();
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) result.push_back(core);
    }
    return result;
  }();
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cores[std::min<size_t>(nth, cores.size() - 1)], &one);
  if (sched_setaffinity(0, sizeof(one), &one) != 0) std::abort();
}

// A process that runs `body` on a core of its own, if there is one; the
// destructor kills and reaps it. The constructor binds the calling process,
// too.
class Child {
 public:
  explicit Child(const std::function<void()>& body) : pid_(Fork()) {
    if (pid_ == 0) {
      BindToCore(1);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      body();
      _exit(0);
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  static pid_t Fork() {
    BindToCore(0);
    const pid_t pid = fork();
    if (pid < 0) std::abort();
    return pid;
  }

  const pid_t pid_;
};

// Two words between processes, each on its own cache line.
struct PingPong {
  alignas(64) std::atomic<uint32_t> ping;
  alignas(64) std::atomic<uint32_t> pong;
};

// Sleeps until `word` is `value`.
void AwaitWord(const std::atomic<uint32_t>& word, uint32_t value) {
  while (true) {
    const uint32_t found = word.load();
    if (found == value) return;
    FutexWait(word, found, absl::InfiniteDuration());
  }
}

// A partner that answers every ping and sleeps in between.
class FutexPartner {
 public:
  FutexPartner()
      : words_(static_cast<PingPong*>(mmap(nullptr, sizeof(PingPong),
                                           PROT_READ | PROT_WRITE,
                                           MAP_SHARED | MAP_ANONYMOUS, -1, 0))),
        child_([this] {
          for (uint32_t i = 1;; ++i) {
            AwaitWord(words_->ping, i);
            words_->pong.store(i);
            FutexWakeAll(words_->pong);
          }
        }) {}
  FutexPartner(const FutexPartner&) = delete;
  FutexPartner& operator=(const FutexPartner&) = delete;
  ~FutexPartner() { munmap(words_, sizeof(PingPong)); }

  void RoundTrip() {
    ++turn_;
    words_->ping.store(turn_);
    FutexWakeAll(words_->ping);
    AwaitWord(words_->pong, turn_);
  }

 private:
  PingPong* words_;
  uint32_t turn_ = 0;
  Child child_;
};

// The ends of a session: the engine's in one process, the client's in the
// other.
struct ClientEnd {
  RingProducer<Submission> submissions;
  RingConsumer<Completion> completions;
};
struct EngineEnd {
  RingConsumer<Submission> submissions;
  RingProducer<Completion> completions;
};

class RingPartner {
 public:
  explicit RingPartner(absl::Duration spin)
      : spin_(spin),
        client_segment_(ValueOrDie(SealedSegment::Create(
            "client", ClientSegmentLayout(1, 4096, 0).segment_bytes))),
        engine_segment_(ValueOrDie(SealedSegment::Create(
            "engine", CompletionSegmentLayout::kSegmentBytes))),
        client_peer_(Peer(engine_segment_)),
        engine_peer_(Peer(client_segment_)),
        end_(Client()),
        child_([this] { Serve(); }) {}

  void RoundTrip() {
    CheckOk(end_.submissions.Push(Submission{}));
    Await(end_.completions);
  }

 private:
  static PeerSegment Peer(const SealedSegment& segment) {
    return ValueOrDie(PeerSegment::Map(
        UniqueFd(fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0)), segment.size()));
  }

  ClientEnd Client() const {
    auto* mine = reinterpret_cast<ClientHeader*>(client_segment_.data());
    auto* peer = reinterpret_cast<const CompletionHeader*>(client_peer_.data());
    return {{&mine->ring, &peer->ring,
             reinterpret_cast<Submission*>(client_segment_.data() +
                                           ClientSegmentLayout::kRing)},
            {&mine->ring, &peer->ring,
             reinterpret_cast<const Completion*>(
                 client_peer_.data() + CompletionSegmentLayout::kRing)}};
  }

  EngineEnd Engine() const {
    auto* mine = reinterpret_cast<CompletionHeader*>(engine_segment_.data());
    auto* peer = reinterpret_cast<const ClientHeader*>(engine_peer_.data());
    return {{&mine->ring, &peer->ring,
             reinterpret_cast<const Submission*>(engine_peer_.data() +
                                                 ClientSegmentLayout::kRing)},
            {&mine->ring, &peer->ring,
             reinterpret_cast<Completion*>(engine_segment_.data() +
                                           CompletionSegmentLayout::kRing)}};
  }

  template <typename Entry>
  void Await(RingConsumer<Entry>& consumer) const {
    Entry entry;
    while (ValueOrDie(consumer.Take(&entry)) == Poll::kEmpty) {
      consumer.Wait(spin_, absl::InfiniteDuration());
    }
    consumer.Release();
  }

  void Serve() const {
    EngineEnd engine = Engine();
    while (true) {
      Await(engine.submissions);
      CheckOk(engine.completions.Push(Completion{}));
    }
  }

  const absl::Duration spin_;
  const SealedSegment client_segment_;
  const SealedSegment engine_segment_;
  const PeerSegment client_peer_;
  const PeerSegment engine_peer_;
  ClientEnd end_;
  const Child child_;
};

// Returns the seconds that `count` calls of `work` take.
template <typename Work>
double Seconds(int count, const Work& work) {
  const double begin = NowSeconds();
  for (int i = 0; i < count; ++i) work();
  return NowSeconds() - begin;
}

void BM_FutexPingPong(benchmark::State& state) {
  FutexPartner futex;
  for (auto _ : state) futex.RoundTrip();
}
BENCHMARK(BM_FutexPingPong)->UseRealTime();

// Measures ring and futex in turns, so that other load of the machine affects
// both; only the ring's turns count as the benchmark's time. The spin is the
// daemon's default, and short enough that the partner does not disturb the
// futex.
void BM_RingRoundTrip(benchmark::State& state) {
  constexpr int kRingTurns = 1000;
  constexpr int kFutexTurns = 100;
  const bool asleep = state.range(0) != 0;
  RingPartner ring(asleep ? absl::ZeroDuration() : absl::Microseconds(50));
  FutexPartner futex;
  double ring_seconds = 0;
  double futex_seconds = 0;
  while (state.KeepRunningBatch(kRingTurns)) {
    ring_seconds += Seconds(kRingTurns, [&ring] { ring.RoundTrip(); });
    state.PauseTiming();
    futex_seconds += Seconds(kFutexTurns, [&futex] { futex.RoundTrip(); });
    state.ResumeTiming();
  }
  state.counters["to_futex"] =
      ring_seconds / kRingTurns / (futex_seconds / kFutexTurns);
}
BENCHMARK(BM_RingRoundTrip)->ArgName("asleep")->Arg(0)->Arg(1)->UseRealTime();

// Sums every 8 bytes, so that all of them are read.
uint64_t Sum(const void* data, uint64_t bytes) {
  const auto* words = static_cast<const uint64_t*>(data);
  return std::accumulate(words, words + bytes / sizeof(uint64_t), uint64_t{0});
}

void BM_CopyAndRead(benchmark::State& state) {
  const uint64_t bytes = static_cast<uint64_t>(state.range(0));
  const SealedSegment mine =
      ValueOrDie(SealedSegment::Create("payload", bytes));
  const PeerSegment peer = ValueOrDie(
      PeerSegment::Map(UniqueFd(fcntl(mine.fd(), F_DUPFD_CLOEXEC, 0)), bytes));
  const std::vector<std::byte> source(bytes, std::byte{1});
  std::vector<std::byte> target(bytes);
  double segment_seconds = 0;
  double memcpy_seconds = 0;
  for (auto _ : state) {
    const double seconds = Seconds(1, [&] {
      std::memcpy(mine.data(), source.data(), bytes);
      benchmark::DoNotOptimize(Sum(peer.data(), bytes));
    });
    state.SetIterationTime(seconds);
    segment_seconds += seconds;
    memcpy_seconds += Seconds(1, [&] {
      std::memcpy(target.data(), source.data(), bytes);
      benchmark::DoNotOptimize(Sum(target.data(), bytes));
    });
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
  state.counters["to_memcpy"] = segment_seconds / memcpy_seconds;
}
BENCHMARK(BM_CopyAndRead)->Arg(1 << 20)->Arg(256 << 20)->UseManualTime();

}  // namespace
}  // namespace optstate::shm
