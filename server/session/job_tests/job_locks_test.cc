// Counts the locks and allocations of a step once a job has taken its first.
//
// The test counts, by thread: malloc and its kin and the locks of pthread, by
// all callers; and the locks of absl::Mutex by our own code, contended or not
// (the linker puts WrapLock in between). Update threads take none of these. The
// thread that pushes and commits takes its job's own lock, once a call and once
// more after the statistics or the update, which it makes without: no two jobs
// lock the same one, so none waits for another.
//
// Sleeping and waking is not counted: futexes belong to the pool, which belongs
// to the job.

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/workers/worker_pool.h"
#include "server/session/testing/job_harness.h"
#include "server/session/testing/quiet_rank.h"

namespace {

struct Counts {
  std::atomic<int> allocations{0};
  std::atomic<int> pthread_locks{0};
  std::atomic<int> absl_locks{0};
  // The first mutexes that were locked, each once.
  std::array<std::atomic<const void*>, 8> locked{};

  void NoteLocked(const void* mutex) {
    ++absl_locks;
    for (auto& slot : locked) {
      const void* seen = slot.load();
      if (seen == nullptr && slot.compare_exchange_strong(seen, mutex)) return;
      if (seen == mutex) return;
    }
  }
};

constexpr int kJobs = 2;
std::atomic<bool> counting{false};
Counts callers[kJobs];
Counts workers;
// Job of a thread that pushes and commits; other threads have -1.
thread_local int caller = -1;

Counts* CountsOfThread() {
  if (!counting.load(std::memory_order_relaxed)) return nullptr;
  if (optstate::scheduler::WorkerPool::CurrentParticipant() > 0) {
    return &workers;
  }
  return caller < 0 ? nullptr : &callers[caller];
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCounted = false;  // sanitizers have these functions themselves
#else
constexpr bool kCounted = true;

#define OPTSTATE_INTERPOSED extern "C" __attribute__((visibility("default")))

extern "C" void* __libc_malloc(size_t);
extern "C" void* __libc_calloc(size_t, size_t);
extern "C" void* __libc_realloc(void*, size_t);
extern "C" void* __libc_memalign(size_t, size_t);

namespace {

void NoteAllocation() {
  if (Counts* counts = CountsOfThread()) ++counts->allocations;
}

template <typename Lock>
int CallNext(const char* name, Lock* lock) {
  if (Counts* counts = CountsOfThread()) ++counts->pthread_locks;
  using Function = int (*)(Lock*);
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name))(lock);
}

}  // namespace

OPTSTATE_INTERPOSED void* malloc(size_t bytes) noexcept {
  NoteAllocation();
  return __libc_malloc(bytes);
}
OPTSTATE_INTERPOSED void* calloc(size_t count, size_t bytes) noexcept {
  NoteAllocation();
  return __libc_calloc(count, bytes);
}
OPTSTATE_INTERPOSED void* realloc(void* memory, size_t bytes) noexcept {
  NoteAllocation();
  return __libc_realloc(memory, bytes);
}
OPTSTATE_INTERPOSED void* aligned_alloc(size_t align, size_t bytes) noexcept {
  NoteAllocation();
  return __libc_memalign(align, bytes);
}
OPTSTATE_INTERPOSED int pthread_mutex_lock(pthread_mutex_t* lock) noexcept {
  return CallNext("pthread_mutex_lock", lock);
}
OPTSTATE_INTERPOSED int pthread_rwlock_rdlock(pthread_rwlock_t* lock) noexcept {
  return CallNext("pthread_rwlock_rdlock", lock);
}
OPTSTATE_INTERPOSED int pthread_rwlock_wrlock(pthread_rwlock_t* lock) noexcept {
  return CallNext("pthread_rwlock_wrlock", lock);
}
#endif

// absl::Mutex::Lock and ReaderLock; the names are in the BUILD file.
extern "C" void RealLock(absl::Mutex*) __asm__(
    "__real__ZN4absl7debian35Mutex4LockEv");
extern "C" void WrapLock(absl::Mutex* mutex) __asm__(
    "__wrap__ZN4absl7debian35Mutex4LockEv");
extern "C" void RealReaderLock(absl::Mutex*) __asm__(
    "__real__ZN4absl7debian35Mutex10ReaderLockEv");
extern "C" void WrapReaderLock(absl::Mutex* mutex) __asm__(
    "__wrap__ZN4absl7debian35Mutex10ReaderLockEv");

void WrapLock(absl::Mutex* mutex) {
  if (Counts* counts = CountsOfThread()) counts->NoteLocked(mutex);
  RealLock(mutex);
}
void WrapReaderLock(absl::Mutex* mutex) {
  if (Counts* counts = CountsOfThread()) counts->NoteLocked(mutex);
  RealReaderLock(mutex);
}

namespace optstate::session {
namespace {

// Observes whether update threads participated.
class WorkerWatch final : public scheduler::StepObserver {
 public:
  void OnRunUpdated(uint64_t, uint64_t) override {
    if (scheduler::WorkerPool::CurrentParticipant() > 0) worked_ = true;
  }
  bool worked() const { return worked_; }

 private:
  std::atomic<bool> worked_{false};
};

JobHarness::Setup SetupOf(bool accumulate, scheduler::StepObserver* observer) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 1 << 18),
                             MakeParameter("b", 1 << 18)};
  setup.accumulate = accumulate;
  setup.workers = 3;
  setup.observer = observer;
  return setup;
}

// One job and its rank, which steps when it is told to.
class Trainer {
 public:
  Trainer(int index, bool accumulate)
      : index_(index), rank_(SetupOf(accumulate, &watch_)) {
    rank_.Step();
  }

  // Takes at least `steps` steps, and until update threads were seen at work.
  void Run(int steps) {
    caller = index_;
    for (int i = 0; i < steps || (!watch_.worked() && i < 1000); ++i) {
      rank_.Step();
    }
    caller = -1;
  }

  bool ok() const { return rank_.ok() && watch_.worked(); }
  // Returns the number of locks that Run() is to take.
  uint64_t locks() const {
    const auto locks_per_step =
        2 * static_cast<uint64_t>(rank_.calls_per_step());
    return (rank_.steps() - 1) * locks_per_step;
  }

 private:
  const int index_;
  WorkerWatch watch_;
  QuietRank rank_;
};

void RunJobs(bool accumulate) {
  if (!kCounted) GTEST_SKIP() << "a sanitizer counts for itself";
  for (Counts& counts : callers) {
    counts.absl_locks = 0;
    for (auto& slot : counts.locked) slot = nullptr;
  }
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (int i = 0; i < kJobs; ++i) {
    trainers.push_back(std::make_unique<Trainer>(i, accumulate));
  }
  std::atomic<bool> go{false};
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (auto& trainer : trainers) {
    threads.emplace_back([&] {
      ++ready;
      while (!go) std::this_thread::yield();
      trainer->Run(20);
    });
  }
  while (ready < kJobs) std::this_thread::yield();
  counting = true;
  go = true;
  for (std::thread& thread : threads) thread.join();
  counting = false;

  EXPECT_EQ(workers.allocations, 0);
  EXPECT_EQ(workers.pthread_locks, 0);
  EXPECT_EQ(workers.absl_locks, 0);
  for (int i = 0; i < kJobs; ++i) {
    EXPECT_TRUE(trainers[i]->ok());
    EXPECT_EQ(callers[i].allocations, 0);
    EXPECT_EQ(callers[i].pthread_locks, 0);
    EXPECT_EQ(static_cast<uint64_t>(callers[i].absl_locks),
              trainers[i]->locks());
    EXPECT_NE(callers[i].locked[0], nullptr);
    EXPECT_EQ(callers[i].locked[1], nullptr);
  }
  EXPECT_NE(callers[0].locked[0], callers[1].locked[0]);
}

TEST(JobLocksTest, Plain) { RunJobs(false); }
TEST(JobLocksTest, Accumulating) { RunJobs(true); }

// Tests that the counters count.
TEST(JobLocksTest, WhatIsTakenIsSeen) {
  if (!kCounted) GTEST_SKIP() << "a sanitizer counts for itself";
  std::thread([] {
    caller = 0;
    callers[0].absl_locks = 0;
    absl::Mutex mutex;
    pthread_mutex_t plain = PTHREAD_MUTEX_INITIALIZER;
    counting = true;
    { const absl::MutexLock lock(&mutex); }
    { const absl::ReaderMutexLock lock(&mutex); }
    pthread_mutex_lock(&plain);
    pthread_mutex_unlock(&plain);
    std::vector<int>* volatile memory = new std::vector<int>(100);
    counting = false;
    delete memory;
  }).join();
  EXPECT_EQ(callers[0].absl_locks, 2);
  EXPECT_EQ(callers[0].pthread_locks, 1);
  EXPECT_EQ(callers[0].allocations, 2);
}

}  // namespace
}  // namespace optstate::session
