#include "server/session/steps/step_timer.h"

#include <chrono>

#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"
#include "server/observe/trace_recorder.h"

namespace optstate::session {
namespace {

std::chrono::steady_clock::time_point now;

void Pass(int64_t nanoseconds) { now += std::chrono::nanoseconds(nanoseconds); }

StepTimer MakeTimer() {
  return StepTimer([] { return now; });
}

TEST(StepTimerTest, NothingBeforeTheFirstStep) {
  StepTimer timer = MakeTimer();
  timer.Enter(StepTimer::Phase::kUpdate);
  v1::Job job;
  timer.Describe(&job);
  EXPECT_FALSE(job.has_last_step_times());
  EXPECT_FALSE(job.has_mean_step_times());
}

// No time counts twice: waiting excludes the time of staging meanwhile.
TEST(StepTimerTest, EachPhaseHasItsTime) {
  StepTimer timer = MakeTimer();
  timer.Enter(StepTimer::Phase::kWaiting);
  Pass(2);
  {
    const StepTimer::Scope staging(&timer, StepTimer::Phase::kStaging);
    Pass(20);
  }
  Pass(3);
  timer.Enter(StepTimer::Phase::kDecide);
  timer.Enter(StepTimer::Phase::kUpdate);
  Pass(8);
  timer.Enter(StepTimer::Phase::kPublish);
  Pass(4);
  timer.Finish(1000);
  Pass(30);  // the ranks' own
  v1::Job job;
  timer.Describe(&job);
  const v1::StepTimes& times = job.last_step_times();
  EXPECT_EQ(times.steps(), 1u);
  EXPECT_EQ(times.staging_ns(), 20u);
  EXPECT_EQ(times.waiting_ns(), 5u);
  EXPECT_EQ(times.decide_ns(), 0u);
  EXPECT_EQ(times.update_ns(), 8u);
  EXPECT_EQ(times.publish_ns(), 4u);
  EXPECT_EQ(times.update_bytes(), 1000u);
}

TEST(StepTimerTest, HistogramsHaveAllSteps) {
  StepTimer timer = MakeTimer();
  for (int64_t step = 1; step <= 20; ++step) {
    timer.Enter(StepTimer::Phase::kUpdate);
    Pass(step == 20 ? 200'000'000'000 : 1'000'000 * step);
    timer.Finish(0);
  }
  v1::Job job;
  timer.Describe(&job);
  ASSERT_EQ(job.step_phases_size(), 5);
  const v1::PhaseHistogram& update = job.step_phases(3);
  EXPECT_EQ(update.phase(), "update");
  ASSERT_EQ(update.steps_size(), update.bounds_s_size() + 1);
  // Up to 1 ms, 3 ms, 10 ms, 30 ms; over 100 s.
  EXPECT_EQ(update.steps(0), 1u);
  EXPECT_EQ(update.steps(1), 2u);
  EXPECT_EQ(update.steps(2), 7u);
  EXPECT_EQ(update.steps(3), 9u);
  EXPECT_EQ(update.steps(update.bounds_s_size()), 1u);
  EXPECT_DOUBLE_EQ(update.sum_s(), 200.190);
  EXPECT_EQ(job.step_phases(0).phase(), "staging");
  EXPECT_EQ(job.step_phases(0).steps(0), 20u);
}

// It is a part of the update's time, which has it too.
TEST(StepTimerTest, StepsOnDiskHaveAPhaseMore) {
  StepTimer timer = MakeTimer();
  timer.Finish(0);  // in memory
  for (uint64_t step = 1; step <= 2; ++step) {
    timer.Enter(StepTimer::Phase::kUpdate);
    Pass(8'000'000);
    timer.NoteDiskWait(1'000'000 * step);
    timer.NoteDiskWait(1'000'000);
    timer.Finish(0);
  }
  v1::Job job;
  timer.Describe(&job);
  EXPECT_EQ(job.last_step_times().update_ns(), 8'000'000u);
  EXPECT_EQ(job.last_step_times().disk_wait_ns(), 3'000'000u);
  EXPECT_EQ(job.mean_step_times().disk_wait_ns(), 5'000'000u / 3);
  ASSERT_EQ(job.step_phases_size(), 6);
  const v1::PhaseHistogram& waits = job.step_phases(5);
  EXPECT_EQ(waits.phase(), "disk wait");
  EXPECT_EQ(waits.steps(0), 0u);
  EXPECT_EQ(waits.steps(1), 2u);  // up to 3 ms; the first step is not there
  EXPECT_DOUBLE_EQ(waits.sum_s(), 0.005);
  EXPECT_EQ(job.step_phases(3).steps(2), 2u);
}

TEST(StepTimerTest, AJobInMemoryWaitsForNoDisk) {
  StepTimer timer = MakeTimer();
  timer.NoteDiskWait(1);
  timer.Drop();
  timer.Finish(0);
  v1::Job job;
  timer.Describe(&job);
  EXPECT_FALSE(job.last_step_times().has_disk_wait_ns());
  EXPECT_FALSE(job.mean_step_times().has_disk_wait_ns());
  EXPECT_EQ(job.step_phases_size(), 5);
}

TEST(StepTimerTest, WhatIsDroppedCountsNot) {
  StepTimer timer = MakeTimer();
  timer.Enter(StepTimer::Phase::kWaiting);
  Pass(10);
  timer.Drop();
  timer.Enter(StepTimer::Phase::kUpdate);
  timer.Finish(0);
  v1::Job job;
  timer.Describe(&job);
  EXPECT_EQ(job.last_step_times().waiting_ns(), 0u);
  EXPECT_EQ(job.mean_step_times().steps(), 1u);
}

TEST(StepTimerTest, AStepBeginsAtZero) {
  StepTimer timer = MakeTimer();
  timer.Enter(StepTimer::Phase::kUpdate);
  Pass(10);
  timer.Finish(0);
  timer.Finish(0);
  v1::Job job;
  timer.Describe(&job);
  EXPECT_EQ(job.last_step_times().update_ns(), 0u);
  EXPECT_EQ(job.mean_step_times().update_ns(), 5u);
}

// The spans of a trace are the times that are counted.
TEST(StepTimerTest, ATraceHasEveryPhase) {
  observe::TraceRecorder recorder;
  observe::TraceSource spans(&recorder, [](uint32_t) -> observe::LaneName {
    return {"steps", "phases"};
  });
  now = std::chrono::steady_clock::now() + std::chrono::hours(1);
  StepTimer timer([] { return now; }, &recorder, &spans);
  ASSERT_TRUE(recorder.Begin(1).ok());
  recorder.Arm();
  recorder.BeginStep(3);
  timer.Enter(StepTimer::Phase::kWaiting);
  Pass(10);
  {
    const StepTimer::Scope staging(&timer, StepTimer::Phase::kStaging);
    Pass(5);
  }
  Pass(2);
  timer.Enter(StepTimer::Phase::kUpdate);
  Pass(100);
  recorder.Disarm();  // the last phase ends when the trace is over
  timer.Finish(1);
  v1::TraceChunk chunk;
  recorder.Take(&chunk);
  recorder.End();
  ASSERT_EQ(chunk.spans_size(), 3);
  const char* const names[] = {"waiting", "staging", "waiting"};
  const int64_t durations[] = {10, 5, 2};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(chunk.spans(i).name(), names[i]);
    EXPECT_EQ(chunk.spans(i).duration_ns(), durations[i]);
    EXPECT_EQ(chunk.spans(i).step(), 3u);
    EXPECT_EQ(chunk.spans(i).lane(), 0u);
  }
}

TEST(StepTimerTest, ATraceCountsStepsThatAreFinished) {
  observe::TraceRecorder recorder;
  observe::TraceSource spans(&recorder, [](uint32_t) -> observe::LaneName {
    return {"steps", "phases"};
  });
  StepTimer timer(&recorder, &spans);
  ASSERT_TRUE(recorder.Begin(2).ok());
  recorder.Arm();
  recorder.BeginStep(3);
  timer.Drop();
  EXPECT_FALSE(recorder.has_step());
  recorder.BeginStep(3);
  timer.Finish(1);
  EXPECT_EQ(recorder.steps(), 1u);
  recorder.BeginStep(4);
  timer.Finish(1);
  EXPECT_TRUE(recorder.is_over());
  recorder.End();
}

TEST(StepTimerTest, TheMeanIsOfTheLastSixteen) {
  StepTimer timer = MakeTimer();
  for (uint64_t step = 1; step <= 40; ++step) timer.Finish(step);
  v1::Job job;
  timer.Describe(&job);
  EXPECT_EQ(job.last_step_times().update_bytes(), 40u);
  EXPECT_EQ(job.mean_step_times().steps(), 16u);
  EXPECT_EQ(job.mean_step_times().update_bytes(), (25u + 40u) / 2);
}

}  // namespace
}  // namespace optstate::session
