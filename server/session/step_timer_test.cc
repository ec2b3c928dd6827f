#include "server/session/step_timer.h"

#include <chrono>
#include <thread>

#include "gtest/gtest.h"

namespace optstate {
namespace {

constexpr uint64_t kMillisecond = 1000000;

void Wait(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

TEST(StepTimerTest, NothingBeforeTheFirstStep) {
  StepTimer timer;
  timer.Enter(StepPhase::kUpdate);
  v1::Job job;
  timer.Describe(&job);
  EXPECT_FALSE(job.has_last_step_times());
  EXPECT_FALSE(job.has_mean_step_times());
}

TEST(StepTimerTest, EachPhaseHasItsTime) {
  StepTimer timer;
  const auto begin = std::chrono::steady_clock::now();
  timer.Enter(StepPhase::kWaiting);
  Wait(2);
  {
    const StepTimer::Scope staging(&timer, StepPhase::kStaging);
    Wait(20);
  }
  Wait(2);
  timer.Enter(StepPhase::kDecide);
  timer.Enter(StepPhase::kUpdate);
  Wait(8);
  timer.Enter(StepPhase::kPublish);
  Wait(3);
  timer.Finish(1000);
  const std::chrono::nanoseconds elapsed =
      std::chrono::steady_clock::now() - begin;
  Wait(30);  // the ranks' own
  v1::Job job;
  timer.Describe(&job);
  const v1::StepTimes& times = job.last_step_times();
  EXPECT_EQ(times.steps(), 1u);
  EXPECT_GE(times.staging_ns(), 20 * kMillisecond);
  EXPECT_GE(times.waiting_ns(), 4 * kMillisecond);
  EXPECT_GE(times.update_ns(), 8 * kMillisecond);
  EXPECT_GE(times.publish_ns(), 3 * kMillisecond);
  // No time counts twice: waiting is without what was staged meanwhile.
  EXPECT_LE(times.staging_ns() + times.waiting_ns() + times.decide_ns() +
                times.update_ns() + times.publish_ns(),
            static_cast<uint64_t>(elapsed.count()));
  EXPECT_EQ(times.update_bytes(), 1000u);
}

TEST(StepTimerTest, WhatIsDroppedCountsNot) {
  StepTimer timer;
  timer.Enter(StepPhase::kWaiting);
  Wait(10);
  timer.Drop();
  timer.Enter(StepPhase::kUpdate);
  timer.Finish(0);
  v1::Job job;
  timer.Describe(&job);
  EXPECT_EQ(job.last_step_times().waiting_ns(), 0u);
  EXPECT_EQ(job.mean_step_times().steps(), 1u);
}

TEST(StepTimerTest, AStepBeginsAtZero) {
  StepTimer timer;
  timer.Enter(StepPhase::kUpdate);
  Wait(10);
  timer.Finish(0);
  timer.Finish(0);
  v1::Job job;
  timer.Describe(&job);
  EXPECT_EQ(job.last_step_times().update_ns(), 0u);
  EXPECT_GE(job.mean_step_times().update_ns(), 5 * kMillisecond);
}

TEST(StepTimerTest, TheMeanIsOfTheLastSixteen) {
  StepTimer timer;
  for (uint64_t step = 1; step <= 40; ++step) timer.Finish(step);
  v1::Job job;
  timer.Describe(&job);
  EXPECT_EQ(job.last_step_times().update_bytes(), 40u);
  EXPECT_EQ(job.mean_step_times().steps(), 16u);
  EXPECT_EQ(job.mean_step_times().update_bytes(), (25u + 40u) / 2);
}

}  // namespace
}  // namespace optstate
