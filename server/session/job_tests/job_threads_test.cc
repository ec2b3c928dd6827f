// Ranks, readers and operators call a Job at once, as transports do.

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

constexpr uint32_t kRanks = 3;
constexpr uint64_t kSteps = 60;

class WaitingListener final : public SessionListener {
 public:
  void OnStepDone(uint64_t request_id, const absl::Status& status,
                  const StepOutcome& outcome) override {
    const absl::MutexLock lock(&mu_);
    request_id_ = request_id;
    status_ = status;
    outcome_ = outcome;
  }
  absl::Status Await(uint64_t request_id, StepOutcome* outcome) {
    const absl::MutexLock lock(&mu_);
    const auto answered = [this, request_id] {
      return request_id_ == request_id;
    };
    mu_.Await(absl::Condition(&answered));
    *outcome = outcome_;
    return status_;
  }

 private:
  absl::Mutex mu_;
  uint64_t request_id_ = 0;
  absl::Status status_;
  StepOutcome outcome_;
};

// Takes the remaining steps as one rank; now and then the rank dies and comes
// back, as its process would.
void TrainAs(uint32_t rank, JobHarness* harness) {
  Job& job = harness->job();
  const auto parameters =
      static_cast<uint32_t>(harness->layout().parameters().size());
  const std::vector<Hyperparams> groups(harness->layout().groups().size(),
                                        AdamHyperparams());
  const auto partition = job.partition(rank);
  ASSERT_TRUE(partition.ok());
  std::vector<std::byte> area((*partition)->gradient_area_bytes + 64);
  for (uint64_t i = 0; i + 4 <= area.size(); i += 4) {
    const float gradient = static_cast<float>(i % 97) / 97 - 0.5f;
    std::memcpy(area.data() + i, &gradient, sizeof(gradient));
  }
  WaitingListener listener;
  AttachSpec attach;
  attach.rank = rank;
  attach.layout_hash = harness->layout().hash();
  attach.gradient_area = area.data();
  attach.gradient_area_bytes = (*partition)->gradient_area_bytes;
  attach.listener = &listener;
  ASSERT_TRUE(job.Attach(attach).ok());
  for (uint64_t step = 1; step <= kSteps; ++step) {
    for (uint32_t p = 0; p < parameters; ++p) {
      const absl::Status pushed = job.Push(rank, step, 0, p, 1);
      ASSERT_TRUE(pushed.ok()) << pushed;
    }
    if (step % 7 == rank) {
      job.Detach(rank);
      ASSERT_TRUE(job.Attach(attach).ok());
      ASSERT_TRUE(job.Push(rank, step, 0, 0, parameters).ok());
    }
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    spec.max_norm = 1;
    job.Commit(rank, step, spec);
    StepOutcome outcome;
    const absl::Status status = listener.Await(step, &outcome);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(outcome.step, step);
    ASSERT_TRUE(outcome.applied);
  }
  job.Detach(rank);
}

TEST(JobThreadsTest, RanksReadersAndOperatorsAtOnce) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}, {.options = adam::kAmsgrad}};
  setup.layout.parameters = {MakeParameter("a", 30000),
                             MakeParameter("b", 9000),
                             MakeParameter("c", 20000, 1)};
  setup.world_size = kRanks;
  setup.partition = PartitionMode::kContiguous;
  setup.workers = 3;
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  harness.DetachAll();

  std::atomic<bool> done{false};
  std::thread operators([&] {
    std::vector<std::byte> master(4 * 9000);
    std::vector<std::byte> counts(8 * 3);
    while (!done) {
      const v1::Job job = harness.job().Describe();
      EXPECT_LE(job.committed_step(), kSteps);
      EXPECT_TRUE(harness.job().ListParameters({}).ok());
      EXPECT_TRUE(
          harness.job()
              .Fetch(v1::STATE_ARRAY_MASTER, 1, 0, 9000, absl::MakeSpan(master))
              .ok());
      // A step is seen by all parameters or by none.
      const auto step = harness.job().Fetch(v1::STATE_ARRAY_STEP_COUNT, 0, 0, 3,
                                            absl::MakeSpan(counts));
      ASSERT_TRUE(step.ok());
      for (int p = 0; p < 3; ++p) {
        int64_t count;
        std::memcpy(&count, counts.data() + 8 * p, sizeof(count));
        EXPECT_EQ(count, static_cast<int64_t>(*step));
      }
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back(TrainAs, rank, &harness);
  }
  for (std::thread& rank : ranks) rank.join();
  done = true;
  operators.join();
  EXPECT_EQ(harness.job().Describe().committed_step(), kSteps);
}

TEST(JobThreadsTest, DrainWaitsForTheOpenStep) {
  JobHarness::Setup setup;
  setup.layout.groups = {{}};
  setup.layout.parameters = {MakeParameter("a", 30000)};
  JobHarness harness(setup);
  harness.Start(harness.RandomTensors(1));
  ASSERT_TRUE(harness.Push(0, 1, 0, 1).ok());
  std::thread drain([&] {
    harness.job().BeginDrain();
    EXPECT_TRUE(harness.job().AwaitDrained(absl::InfiniteFuture()).ok());
  });
  const std::vector<Hyperparams> groups(1, AdamHyperparams());
  CommitSpec spec;
  spec.step = 1;
  spec.groups = groups;
  EXPECT_TRUE(harness.CommitAll(spec).outcome.applied);
  drain.join();
  EXPECT_EQ(harness.Push(0, 2, 0, 1).code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace optstate::session
