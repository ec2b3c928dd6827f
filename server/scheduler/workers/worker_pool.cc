#include "server/scheduler/workers/worker_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace optstate::scheduler {
namespace {

// About 20 to 50 microseconds, the price of waking a sleeper on another core: a
// thread that spins longer loses more than the sleep would have cost.
constexpr int kSpinRounds = 1000;

thread_local int current_participant = 0;

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Binds a thread. When this fails the thread's initial mask stays in force: a
// core may have been taken from us since.
void Bind(pthread_t thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  const auto count = static_cast<size_t>(cpus.back()) + 1;
  cpu_set_t* const set = CPU_ALLOC(count);
  const size_t bytes = CPU_ALLOC_SIZE(count);
  CPU_ZERO_S(bytes, set);
  for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
  (void)pthread_setaffinity_np(thread, bytes, set);
  CPU_FREE(set);
}

// Moves this thread to another processor than `cpu`, if it may run on one. From
// then on the thread's mask is its own: it does not follow a cpuset that grows.
void LeaveCpu(int cpu) {
  cpu_set_t mask;
  if (::sched_getaffinity(0, sizeof(mask), &mask) != 0) return;
  cpu_set_t others = mask;
  CPU_CLR(static_cast<size_t>(cpu), &others);
  if (CPU_COUNT(&others) == 0) return;
  if (::sched_setaffinity(0, sizeof(others), &others) != 0) return;
  (void)::sched_setaffinity(0, sizeof(mask), &mask);
}

}  // namespace

WorkerPool::WorkerPool(int participants, bool spin,
                       const WorkerPlacement& placement,
                       observe::TraceRecorder* trace)
    : spin_rounds_(spin ? kSpinRounds : 0),
      participants_(static_cast<size_t>(std::max(participants, 1))),
      shares_(std::make_unique<Share[]>(participants_)) {
  FindNeighbours(placement);
  for (size_t i = 0; trace != nullptr && i < participants_; ++i) {
    traces_.push_back(std::make_unique<observe::TraceSource>(
        trace, [i](uint32_t /*lane*/) -> observe::LaneName {
          return {"workers", absl::StrCat("worker ", i)};
        }));
  }
  threads_.reserve(participants_ - 1);
  for (size_t i = 1; i < participants_; ++i) {
    threads_.emplace_back([this, i] { Run(static_cast<int>(i)); });
    const std::string name = absl::StrCat("update-", i);
    pthread_setname_np(threads_.back().native_handle(), name.c_str());
    if (i < placement.seats.size()) {
      Bind(threads_.back().native_handle(), placement.seats[i].cpus);
    }
  }
}

void WorkerPool::FindNeighbours(const WorkerPlacement& placement) {
  const auto node_of = [&](size_t i) {
    return i < placement.seats.size() ? placement.seats[i].node : 0;
  };
  for (size_t begin = 0; begin < participants_;) {
    size_t end = begin + 1;
    while (end < participants_ && node_of(end) == node_of(begin)) ++end;
    for (size_t i = begin; i < end; ++i) {
      shares_[i].node_begin = begin;
      shares_[i].node_end = end;
    }
    begin = end;
  }
}

WorkerPool::~WorkerPool() {
  stop_.store(true, std::memory_order_relaxed);
  doorbell_.fetch_add(1, std::memory_order_release);
  doorbell_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Start(const IndexRange& range,
                       absl::FunctionRef<void(size_t)> body, const char* span) {
  span_ = span;
  body_.emplace(body);
  range_ = range;
  const size_t count = range.end - range.begin;
  if (IsForCaller()) return;
  for (size_t i = 0; i < participants_; ++i) {
    const IndexRange own = ShareOf(i, participants_, range.total);
    Share& share = shares_[i];
    share.end = std::clamp(own.end, range.begin, range.end);
    share.next.store(std::clamp(own.begin, range.begin, range.end),
                     std::memory_order_relaxed);
  }
  caller_cpu_.store(::sched_getcpu(), std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  doorbell_.fetch_add(1, std::memory_order_release);
  if (count - 1 >= threads_.size()) {
    doorbell_.notify_all();
  } else {
    for (size_t i = 1; i < count; ++i) doorbell_.notify_one();
  }
}

void WorkerPool::Finish() {
  const int64_t begin_ns = range_.begin == range_.end ? 0 : BeginSpan(0);
  if (IsForCaller()) {
    for (size_t i = range_.begin; i < range_.end; ++i) (*body_)(i);
    EndSpan(0, begin_ns);
    return;
  }
  // Linux may have woken a worker on this processor, where it would wait until
  // all is done, or for milliseconds until another processor takes it: yielding
  // lets it run, and it moves elsewhere by itself (Run). This is not done with
  // fewer cores than threads: others would take the time.
  TakeOne(&shares_[0]);
  if (spin_rounds_ > 0 && gate_.load(std::memory_order_relaxed) == kOpen) {
    ::sched_yield();
  }
  Work(0);
  EndSpan(0, begin_ns);
  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  AwaitEmptyGate();
}

bool WorkerPool::Work(size_t self) {
  const size_t begin = shares_[self].node_begin;
  const size_t end = shares_[self].node_end;
  bool has_worked = false;
  for (size_t i = self; i < end; ++i) has_worked |= WorkOn(&shares_[i]);
  for (size_t i = begin; i < self; ++i) has_worked |= WorkOn(&shares_[i]);
  for (size_t i = end; i < participants_; ++i) {
    has_worked |= WorkOn(&shares_[i]);
  }
  for (size_t i = 0; i < begin; ++i) has_worked |= WorkOn(&shares_[i]);
  return has_worked;
}

bool WorkerPool::WorkOn(Share* share) {
  if (!TakeOne(share)) return false;
  while (TakeOne(share)) {
  }
  return true;
}

bool WorkerPool::TakeOne(Share* share) {
  const size_t end = share->end;
  // `next` is read before adding, so that threads that come when all is done do
  // not take the cache line from each other.
  if (share->next.load(std::memory_order_relaxed) >= end) return false;
  const size_t i = share->next.fetch_add(1, std::memory_order_relaxed);
  if (i >= end) return false;
  (*body_)(i);
  return true;
}

int WorkerPool::CurrentParticipant() { return current_participant; }

void WorkerPool::Run(int participant) {
  current_participant = participant;
  uint32_t seen = 0;
  while (true) {
    seen = AwaitDoorbell(seen);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!Join()) continue;
    const int caller_cpu = caller_cpu_.load(std::memory_order_relaxed);
    if (caller_cpu >= 0 && ::sched_getcpu() == caller_cpu) LeaveCpu(caller_cpu);
    const auto self = static_cast<size_t>(participant);
    const int64_t begin_ns = BeginSpan(self);
    if (Work(self)) EndSpan(self, begin_ns);
    Leave();
  }
}

bool WorkerPool::Join() {
  uint32_t gate = gate_.load(std::memory_order_relaxed);
  while ((gate & kOpen) != 0) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire,
                                    std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

void WorkerPool::Leave() {
  // The release pairs with AwaitEmptyGate: the bodies' writes come with it.
  if (gate_.fetch_sub(1, std::memory_order_release) == 1) gate_.notify_one();
}

uint32_t WorkerPool::AwaitDoorbell(uint32_t seen) {
  for (int round = 0; round < spin_rounds_; ++round) {
    const uint32_t now = doorbell_.load(std::memory_order_acquire);
    if (now != seen) return now;
    Pause();
  }
  doorbell_.wait(seen, std::memory_order_acquire);
  return doorbell_.load(std::memory_order_acquire);
}

void WorkerPool::AwaitEmptyGate() {
  int rounds = spin_rounds_;
  uint32_t gate = gate_.load(std::memory_order_acquire);
  while (gate != 0) {
    if (rounds-- > 0) {
      Pause();
    } else {
      gate_.wait(gate, std::memory_order_acquire);
    }
    gate = gate_.load(std::memory_order_acquire);
  }
}

}  // namespace optstate::scheduler
