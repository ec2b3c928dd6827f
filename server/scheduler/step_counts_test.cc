#include "server/scheduler/step_counts.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/scheduler_test_job.h"
#include "storage/persist_in_order.h"

namespace optstate::scheduler {
namespace {

// A count as a killed process leaves it.
struct Left {
  std::vector<int64_t> counts;
  std::vector<double> scalars;
  std::vector<std::byte> control;
};

// Takes what is left at each point while it lives.
class Witness {
 public:
  explicit Witness(SchedulerTestJob* job) {
    job_ = job;
    storage::persist_hook.store([](storage::PersistPoint) { Look(); });
  }
  ~Witness() { storage::persist_hook.store(nullptr); }
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;

  static void Look() {
    const auto counts = job_->step_counts();
    const auto scalars = job_->store().scalars();
    const auto* const control =
        reinterpret_cast<const std::byte*>(&job_->control());
    left.push_back({{counts.begin(), counts.end()},
                    {scalars.begin(), scalars.end()},
                    {control, control + sizeof(storage::ControlFile)}});
  }

  static inline std::vector<Left> left;

 private:
  static inline SchedulerTestJob* job_ = nullptr;
};

TEST(StepCountsTest, CountsWhatIsUpdated) {
  SchedulerTestJob job({});
  std::vector<uint8_t> updated(job.step_counts().size(), 1);
  updated[2] = 0;
  job.SetUpdated(updated);
  StepCounts counts(&job.plan(), &job.memory());
  counts.Count(job.UpdateOf(1));
  for (size_t p = 0; p < updated.size(); ++p) {
    EXPECT_EQ(job.step_counts()[p], updated[p]);
  }
}

TEST(StepCountsTest, InputHasTheCountAfterTheStepAndTheGroupsFactor) {
  SchedulerTestJob job({});
  job.step_counts()[5] = 11;
  const StepCounts counts(&job.plan(), &job.memory());
  StepUpdate update = job.UpdateOf(20);
  update.gradient_limit = 3;
  const kernels::UpdateInput input = counts.InputOf(5, update);
  EXPECT_EQ(input.step_count, 12);
  EXPECT_EQ(input.gradient_factor, 0.25);
  EXPECT_EQ(input.gradient_limit, 3);
  EXPECT_EQ(input.step, 20u);
  EXPECT_EQ(counts.InputOf(0, update).gradient_factor, 0.5);
}

// Wherever the process is killed, another one ends with the same numbers.
TEST(StepCountsTest, AnInterruptedCountIsResumed) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kNadam}) {
    SchedulerTestJob job({.optimizer = kind});
    StepCounts counts(&job.plan(), &job.memory());
    counts.Count(job.UpdateOf(1));  // so that the numbers differ
    job.step_counts()[1] += 5;
    job.control().counts_begun = 0;
    Witness::left.clear();
    {
      const Witness witness(&job);
      counts.Count(job.UpdateOf(2));
      Witness::Look();
    }
    ASSERT_GT(Witness::left.size(), 2 * job.step_counts().size());
    const Left done = Witness::left.back();
    for (const Left& left : Witness::left) {
      std::copy(left.counts.begin(), left.counts.end(),
                job.step_counts().begin());
      std::copy(left.scalars.begin(), left.scalars.end(),
                job.store().scalars().begin());
      std::memcpy(static_cast<void*>(&job.control()), left.control.data(),
                  left.control.size());
      counts.Count(job.UpdateOf(2));
      EXPECT_EQ(std::vector<int64_t>(job.step_counts().begin(),
                                     job.step_counts().end()),
                done.counts);
      EXPECT_EQ(std::vector<double>(job.store().scalars().begin(),
                                    job.store().scalars().end()),
                done.scalars);
    }
  }
}

}  // namespace
}  // namespace optstate::scheduler
