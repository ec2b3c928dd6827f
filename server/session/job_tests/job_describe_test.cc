// Operators' calls, and those of the thread that hears the supervisor, do not
// wait for a step: they return while gradients are taken in, while the step is
// being applied, and while it is made durable.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "server/scheduler/step_observer.h"
#include "server/session/testing/job_crash_fixture.h"
#include "server/session/testing/job_harness.h"

namespace {

// While set, a flush to the disk waits for it.
std::atomic<const std::function<void()>*> on_flush{nullptr};

}  // namespace

int RealDataSync(int fd) asm("__real_fdatasync");
int WrappedDataSync(int fd) asm("__wrap_fdatasync");
int WrappedDataSync(int fd) {
  const std::function<void()>* hook = on_flush;
  if (hook != nullptr) (*hook)();
  return RealDataSync(fd);
}

namespace optstate::session {
namespace {

// Stops the first thread that comes to it until the test lets it go on.
class Barrier {
 public:
  ~Barrier() { Open(); }
  void Stop() {
    if (closed_.exchange(false)) reached_.Notify();
    opened_.WaitForNotification();
  }
  // A barrier that is not closed stops none.
  void Close() { closed_ = true; }
  void AwaitReached() const { reached_.WaitForNotification(); }
  bool is_open() const { return opened_.HasBeenNotified(); }
  void Open() {
    if (!is_open()) opened_.Notify();
  }

 private:
  std::atomic<bool> closed_{false};
  absl::Notification reached_;
  absl::Notification opened_;
};

class StopsInStep final : public scheduler::StepObserver {
 public:
  explicit StopsInStep(Barrier* barrier) : barrier_(barrier) {}
  void OnGradientsRead() override {
    if (stops_.load()) barrier_->Stop();
  }
  void OnRunUpdated(uint64_t, uint64_t) override {
    if (stops_.load()) barrier_->Stop();
  }
  void Stop() {
    barrier_->Close();
    stops_ = true;
  }

 private:
  Barrier* const barrier_;
  std::atomic<bool> stops_{false};
};

JobHarness::Setup SetupOf(scheduler::StepObserver* observer) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 20000),
                             MakeParameter("b", 5000)};
  setup.observer = observer;
  return setup;
}

CommitSpec CommitOf(uint64_t step, const std::vector<Hyperparams>& groups) {
  CommitSpec spec;
  spec.step = step;
  spec.groups = groups;
  return spec;
}

// Returns what `call` returns, or nullopt when it does not return while the
// barrier is closed. The time is only how long a failing test takes.
template <typename T>
std::optional<T> WithoutWaiting(Barrier* barrier, std::function<T()> call) {
  std::future<T> result = std::async(std::launch::async, std::move(call));
  if (result.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
    barrier->Open();
    result.wait();
    return std::nullopt;
  }
  return result.get();
}

void ExpectDescribed(JobHarness* harness, Barrier* barrier,
                     uint64_t committed_step, int64_t step_count,
                     const std::string& open_step) {
  const auto job = WithoutWaiting<v1::Job>(
      barrier, [&] { return harness->job().Describe(); });
  ASSERT_TRUE(job.has_value()) << "Describe waited for the step";
  EXPECT_EQ(job->phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(job->committed_step(), committed_step);
  EXPECT_EQ(job->session_count(), 1);
  EXPECT_EQ(job->open_step(), open_step);
  const auto listed = WithoutWaiting<absl::StatusOr<v1::ListParametersReply>>(
      barrier, [&] { return harness->job().ListParameters({}); });
  ASSERT_TRUE(listed.has_value()) << "ListParameters waited for the step";
  ASSERT_TRUE(listed->ok()) << listed->status();
  ASSERT_EQ((*listed)->parameters_size(), 2);
  for (const v1::ParameterInfo& info : (*listed)->parameters()) {
    EXPECT_EQ(info.step_count(), step_count);
  }
}

// A push that is long enough not to be taken in under the lock.
JobHarness::Setup WithALongPush(scheduler::StepObserver* observer) {
  JobHarness::Setup setup = SetupOf(observer);
  setup.layout.parameters[0] = MakeParameter("a", 200000);
  return setup;
}

TEST(JobDescribeTest, ReturnsWhileAPushIsTakenIn) {
  Barrier barrier;
  StopsInStep observer(&barrier);
  JobHarness harness(WithALongPush(&observer));
  harness.Start(harness.RandomTensors(1));
  harness.SetGradients(harness.RandomTensors(3));
  observer.Stop();
  std::thread rank([&] { EXPECT_TRUE(harness.Push(0, 1, 0, 2).ok()); });
  barrier.AwaitReached();
  ExpectDescribed(&harness, &barrier, /*committed_step=*/0, /*step_count=*/0,
                  "step 1: rank 0 has not committed");
  EXPECT_FALSE(barrier.is_open());
  barrier.Open();
  rank.join();
}

TEST(JobDescribeTest, ReturnsWhileMicroStepsAreSummed) {
  Barrier barrier;
  StopsInStep observer(&barrier);
  JobHarness::Setup setup = WithALongPush(&observer);
  setup.partition = PartitionMode::kReplicated;
  setup.accumulate = true;
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  harness.SetGradients(harness.RandomTensors(3));
  observer.Stop();
  std::thread rank([&] { EXPECT_TRUE(harness.Push(0, 1, 0, 2).ok()); });
  barrier.AwaitReached();
  ExpectDescribed(&harness, &barrier, /*committed_step=*/0, /*step_count=*/0,
                  "step 1: rank 0 has not committed");
  EXPECT_FALSE(barrier.is_open());
  barrier.Open();
  rank.join();
}

TEST(JobDescribeTest, ReturnsWhileANormIsTaken) {
  Barrier barrier;
  StopsInStep observer(&barrier);
  JobHarness harness(SetupOf(&observer));
  harness.Start(harness.RandomTensors(1));
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  CommitSpec commit = CommitOf(1, groups);
  commit.max_norm = 1;
  commit.norm_type = 1;
  harness.SetGradients(harness.RandomTensors(3));
  harness.PushAll(1);
  observer.Stop();
  std::thread rank([&] { EXPECT_TRUE(harness.CommitAll(commit).status.ok()); });
  barrier.AwaitReached();
  ExpectDescribed(&harness, &barrier, /*committed_step=*/0, /*step_count=*/0,
                  "step 1: all ranks have committed");
  EXPECT_FALSE(barrier.is_open());
  barrier.Open();
  rank.join();
}

TEST(JobDescribeTest, ReturnsWhileAStepIsApplied) {
  Barrier barrier;
  StopsInStep observer(&barrier);
  JobHarness harness(SetupOf(&observer));
  harness.Start(harness.RandomTensors(1));
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  harness.Step(1, harness.RandomTensors(2), CommitOf(1, groups));
  harness.SetGradients(harness.RandomTensors(3));
  harness.PushAll(2);
  observer.Stop();
  std::thread rank([&] { harness.CommitAll(CommitOf(2, groups)); });
  barrier.AwaitReached();
  // The counts are those of the state between two steps, never of the middle.
  ExpectDescribed(&harness, &barrier, /*committed_step=*/1, /*step_count=*/1,
                  "step 2: applying");
  EXPECT_FALSE(barrier.is_open());
  barrier.Open();
  rank.join();
  EXPECT_EQ(harness.job().Describe().committed_step(), 2);
  EXPECT_EQ(harness.job().ListParameters({})->parameters(0).step_count(), 2);
}

TEST(JobDescribeTest, ReturnsWhileAStepIsMadeDurable) {
  Barrier barrier;
  JobHarness::Setup setup = SetupOf(nullptr);
  setup.storage.set_durability(v1::DURABILITY_KIND_STEP);
  setup.io_engine = v1::IO_ENGINE_KIND_BLOCKING;
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  harness.SetGradients(harness.RandomTensors(3));
  harness.PushAll(1);
  const std::function<void()> stop = [&] { barrier.Stop(); };
  barrier.Close();
  on_flush = &stop;
  std::thread rank([&] { harness.CommitAll(CommitOf(1, groups)); });
  barrier.AwaitReached();
  ExpectDescribed(&harness, &barrier, /*committed_step=*/1, /*step_count=*/1,
                  "step 1: recorded");
  EXPECT_FALSE(barrier.is_open());
  on_flush = nullptr;
  barrier.Open();
  rank.join();
  EXPECT_EQ(harness.job().Describe().disk().durable_step(), 1);
}

// A call that needs the state waits for the step, and then sees all of it.
TEST(JobDescribeTest, CallsThatReadTheStateWaitForTheStep) {
  Barrier barrier;
  StopsInStep observer(&barrier);
  JobHarness harness(SetupOf(&observer));
  harness.Start(harness.RandomTensors(1));
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  harness.SetGradients(harness.RandomTensors(3));
  harness.PushAll(1);
  observer.Stop();
  std::thread rank([&] { harness.CommitAll(CommitOf(1, groups)); });
  barrier.AwaitReached();
  std::atomic<bool> read{false};
  std::thread reader([&] {
    EXPECT_EQ(harness.StepCounts(), (std::vector<int64_t>{1, 1}));
    read = true;
  });
  ExpectDescribed(&harness, &barrier, /*committed_step=*/0, /*step_count=*/0,
                  "step 1: applying");
  EXPECT_FALSE(read);
  barrier.Open();
  rank.join();
  reader.join();
}

// The calls of the thread that hears the supervisor, while rank 0 has brought
// the gradients with which the step of a former engine is being finished.
TEST_F(JobCrashTest, TheSupervisorIsHeardWhileAStepIsFinished) {
  ASSERT_NO_FATAL_FAILURE(DieInStep3(Instant::kMarked));
  ASSERT_TRUE(harness_.Open().ok());  // only to know the sizes
  RememberGradients();
  std::vector<KeptGradients> kept;
  kept.push_back(harness_.KeepGradients(1, 4096));
  harness_.Close();
  Barrier barrier;
  StopsInStep observer(&barrier);
  harness_.setup().observer = &observer;
  ASSERT_TRUE(harness_.OpenWith(std::move(kept)).ok());
  ASSERT_TRUE(harness_.Register(0).ok());
  const AttachSpec spec = harness_.AttachSpecOf(0);
  observer.Stop();
  Job& job = harness_.job();
  std::thread rank([&] { EXPECT_TRUE(job.Attach(spec).ok()); });
  barrier.AwaitReached();
  EXPECT_EQ(WithoutWaiting<bool>(&barrier, [&] { return job.finished(); }),
            false);
  const std::vector<FormerRank> awaited = job.Awaited();
  ASSERT_EQ(awaited.size(), 1u);
  EXPECT_TRUE(WithoutWaiting<bool>(&barrier,
                                   [&] {
                                     job.GiveUp(awaited[0]);
                                     job.BeginDrain();
                                     return true;
                                   })
                  .has_value())
      << "GiveUp waited for the step";
  EXPECT_EQ(job.Awaited().size(), 1u) << "the step is being finished";
  EXPECT_FALSE(barrier.is_open());
  barrier.Open();
  rank.join();
  EXPECT_EQ(job.Awaited().size(), 0u);
  EXPECT_TRUE(job.AwaitDrained(absl::InfinitePast()).ok());
  EXPECT_EQ(committed_step(), 3);
  EXPECT_TRUE(harness_.StateBytes() == expected_);
  harness_.setup().observer = nullptr;
}

}  // namespace
}  // namespace optstate::session
