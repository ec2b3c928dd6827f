// Traces of jobs: what they show, when they end, and that they change nothing.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/session/testing/disk_job_fixture.h"
#include "server/session/testing/job_harness.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

// A trace that a thread of its own takes.
class BackgroundTrace {
 public:
  // Returns when the job records.
  explicit BackgroundTrace(JobHarness* job, uint32_t steps,
                           absl::Time deadline = absl::InfiniteFuture())
      : thread_([this, job, steps, deadline] { Run(job, steps, deadline); }) {
    begun_.WaitForNotification();
  }
  ~BackgroundTrace() {
    cancelled_ = true;
    if (thread_.joinable()) thread_.join();
  }
  BackgroundTrace(const BackgroundTrace&) = delete;
  BackgroundTrace& operator=(const BackgroundTrace&) = delete;

  absl::Status Join() {
    thread_.join();
    return status_;
  }
  absl::Status Cancel() {
    cancelled_ = true;
    return Join();
  }

  // After Join().
  uint32_t steps() const { return last_.steps(); }
  bool done() const { return last_.done(); }
  uint64_t lost() const { return lost_; }
  const v1::TraceChunk& all() const { return all_; }
  const v1::TraceLane& LaneOf(const v1::TraceSpan& span) const {
    return all_.lanes(static_cast<int>(span.lane()));
  }
  // "lane: span" of all spans, each once.
  std::set<std::string> Kinds() const {
    std::set<std::string> kinds;
    for (const v1::TraceSpan& span : all_.spans()) {
      kinds.insert(absl::StrCat(LaneOf(span).group(), "/", LaneOf(span).name(),
                                ": ", span.name()));
    }
    return kinds;
  }
  uint64_t NanosOf(const std::string& group, const std::string& name) const {
    uint64_t ns = 0;
    for (const v1::TraceSpan& span : all_.spans()) {
      if (LaneOf(span).group() != group || span.name() != name) continue;
      ns += static_cast<uint64_t>(span.duration_ns());
    }
    return ns;
  }
  uint64_t BytesOf(const std::string& group, const std::string& name) const {
    uint64_t bytes = 0;
    for (const v1::TraceSpan& span : all_.spans()) {
      if (LaneOf(span).group() == group && span.name() == name) {
        bytes += span.bytes();
      }
    }
    return bytes;
  }
  std::set<uint64_t> StepsOf(const std::string& group) const {
    std::set<uint64_t> steps;
    for (const v1::TraceSpan& span : all_.spans()) {
      if (LaneOf(span).group() == group) steps.insert(span.step());
    }
    return steps;
  }
  void ExpectWellFormed() const {
    EXPECT_NE(all_.began_at_ns(), 0);
    EXPECT_EQ(lost_, 0u);
    std::map<uint32_t, std::vector<std::pair<int64_t, int64_t>>> by_lane;
    for (const v1::TraceSpan& span : all_.spans()) {
      ASSERT_LT(span.lane(), static_cast<uint32_t>(all_.lanes_size()));
      EXPECT_GE(span.begin_ns(), 0);
      EXPECT_GE(span.duration_ns(), 0);
      by_lane[span.lane()].emplace_back(span.begin_ns(),
                                        span.begin_ns() + span.duration_ns());
    }
    for (auto& [lane, spans] : by_lane) {
      std::sort(spans.begin(), spans.end());
      for (size_t i = 1; i < spans.size(); ++i) {
        EXPECT_LE(spans[i - 1].second, spans[i].first)
            << all_.lanes(static_cast<int>(lane)).name();
      }
    }
  }

 private:
  void Run(JobHarness* job, uint32_t steps, absl::Time deadline) {
    v1::TraceJobRequest request;
    request.set_steps(steps);
    status_ = job->job().Trace(
        request, deadline, [this](const v1::TraceChunk& chunk) {
          if (!begun_.HasBeenNotified()) {
            EXPECT_NE(chunk.began_at_ns(), 0);
            begun_.Notify();
          }
          EXPECT_FALSE(last_.done()) << "nothing comes after the last one";
          lost_ += chunk.lost_spans();
          all_.MergeFrom(chunk);
          last_ = chunk;
          return !cancelled_;
        });
    if (!begun_.HasBeenNotified()) begun_.Notify();
  }

  absl::Notification begun_;
  std::atomic<bool> cancelled_ = false;
  absl::Status status_;
  v1::TraceChunk all_;
  v1::TraceChunk last_;
  uint64_t lost_ = 0;
  std::thread thread_;
};

JobHarness::Setup MemorySetup() {
  JobHarness::Setup setup =
      DiskJobSetup(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_UNSPECIFIED);
  setup.io_engine = v1::IO_ENGINE_KIND_UNSPECIFIED;
  setup.world_size = 2;
  return setup;
}

std::unique_ptr<JobHarness> Start(JobHarness::Setup setup) {
  auto job = std::make_unique<JobHarness>(std::move(setup));
  job->Start(job->RandomTensors(kSeed));
  return job;
}

TEST(JobTraceTest, ItShowsTheStepsThatItIsAskedFor) {
  const auto job = Start(MemorySetup());
  BackgroundTrace trace(job.get(), 2);
  Train(job.get(), 1, 4);
  ASSERT_TRUE(trace.Join().ok());
  EXPECT_TRUE(trace.done());
  EXPECT_EQ(trace.steps(), 2u);
  trace.ExpectWellFormed();
  EXPECT_THAT(
      trace.Kinds(),
      IsSupersetOf({"steps/phases: staging", "steps/phases: decide",
                    "steps/phases: update", "steps/phases: publish",
                    "ranks/rank 0: push", "ranks/rank 1: push",
                    "workers/worker 0: staging", "workers/worker 0: update"}));
  for (const char* group : {"steps", "ranks", "workers"}) {
    EXPECT_EQ(trace.StepsOf(group), (std::set<uint64_t>{1, 2})) << group;
  }
  // Two steps' gradients of 8 sub-groups, as floats.
  EXPECT_EQ(trace.BytesOf("ranks", "push"), 2 * 8 * kSubGroup * 4);
}

// Its times are those of `optctl describe job`, and a worker's are a part of
// them.
TEST(JobTraceTest, TheUpdateTakesWhatTheTimesOfStepsSay) {
  const auto job = Start(MemorySetup());
  BackgroundTrace trace(job.get(), 3);
  Train(job.get(), 1, 3);
  ASSERT_TRUE(trace.Join().ok());
  const v1::StepTimes mean = job->job().Describe().mean_step_times();
  ASSERT_EQ(mean.steps(), 3u);
  const uint64_t update_ns = trace.NanosOf("steps", "update");
  EXPECT_GE(update_ns, 3 * mean.update_ns());
  EXPECT_LT(update_ns, 3 * mean.update_ns() + 3);  // the mean was rounded down
  const uint64_t decide_ns = trace.NanosOf("steps", "decide");
  EXPECT_GE(decide_ns, 3 * mean.decide_ns());
  EXPECT_LT(decide_ns, 3 * mean.decide_ns() + 3);
  EXPECT_GT(trace.NanosOf("workers", "update"), 0u);
  EXPECT_LE(trace.NanosOf("workers", "update"), 2 * update_ns);
}

// The times of a step have what the store has counted for its pass, which it
// tells when the next pass begins.
TEST(JobTraceTest, TheTimesOfAStepOnDiskHaveItsWaitForRecords) {
  const auto job =
      Start(DiskJobSetup(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_NONE));
  const uint64_t frames = job->job().Describe().disk().frames();
  ASSERT_LT(frames, 8u) << "nothing is read";
  for (uint64_t step = 1; step <= 3; step += 2) {
    Train(job.get(), step, step);
    const v1::StepTimes times = job->job().Describe().last_step_times();
    ASSERT_TRUE(times.has_disk_wait_ns());
    EXPECT_LE(times.disk_wait_ns(), times.update_ns());
    Train(job.get(), step + 1, step + 1);
    EXPECT_EQ(job->job().Describe().disk().step_waited_ns(),
              times.disk_wait_ns());
  }
  const v1::Job described = job->job().Describe();
  const v1::PhaseHistogram& waits = *described.step_phases().rbegin();
  EXPECT_EQ(waits.phase(), "disk wait");
  EXPECT_EQ(
      std::accumulate(waits.steps().begin(), waits.steps().end(), uint64_t{0}),
      4u);
}

TEST(JobTraceTest, AJobInMemoryHasNoWaitForADisk) {
  const auto job = Start(MemorySetup());
  Train(job.get(), 1, 1);
  const v1::Job described = job->job().Describe();
  EXPECT_FALSE(described.last_step_times().has_disk_wait_ns());
  EXPECT_EQ(described.step_phases_size(), 5);
}

TEST(JobTraceTest, ResultsAreTheSameBits) {
  for (const v1::Placement placement :
       {v1::PLACEMENT_HOST, v1::PLACEMENT_NVME}) {
    const auto setup = DiskJobSetup(placement, v1::DURABILITY_KIND_NONE);
    const auto traced = Start(setup);
    const auto plain = Start(setup);
    {
      BackgroundTrace trace(traced.get(), 3);
      Train(traced.get(), 1, 5);
      EXPECT_TRUE(trace.Join().ok());
      EXPECT_EQ(trace.steps(), 3u);
    }
    Train(plain.get(), 1, 5);
    EXPECT_EQ(traced->StateBytes(), plain->StateBytes());
  }
}

TEST(JobTraceTest, AJobOnDiskShowsItsRequests) {
  const auto job =
      Start(DiskJobSetup(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP));
  Train(job.get(), 1, 1);
  BackgroundTrace trace(job.get(), 4);
  Train(job.get(), 2, 6);
  ASSERT_TRUE(trace.Join().ok());
  trace.ExpectWellFormed();
  std::set<std::string> names;
  for (const v1::TraceSpan& span : trace.all().spans()) {
    const v1::TraceLane& lane = trace.LaneOf(span);
    if (lane.group() != "disks") continue;
    EXPECT_TRUE(absl::StrContains(lane.name(), " of " + job->disk()))
        << lane.name();
    names.insert(span.name());
  }
  EXPECT_EQ(names, (std::set<std::string>{"read", "sync", "write"}));
  // Each step reads and writes both moments of the records for which there is
  // no room in memory, which are most of the eight.
  EXPECT_GE(trace.BytesOf("disks", "read"), 3 * 4 * 2 * 4 * kSubGroup);
  EXPECT_GE(trace.BytesOf("disks", "write"), 3 * 4 * 2 * 4 * kSubGroup);
}

TEST(JobTraceTest, DevicesShowCopiesAndKernels) {
  JobHarness::Setup setup = MemorySetup();
  setup.world_size = 1;
  setup.storage.set_offload_fraction(0);
  setup.devices = "emulated:2";
  const auto job = Start(setup);
  BackgroundTrace trace(job.get(), 2);
  Train(job.get(), 1, 3);
  ASSERT_TRUE(trace.Join().ok());
  trace.ExpectWellFormed();
  EXPECT_THAT(trace.Kinds(), IsSupersetOf({"device 0/to device: to device",
                                           "device 0/kernel: kernel",
                                           "device 0/from device: from device",
                                           "workers/worker 0: update"}));
  // Masters and two moments, as floats; gradients go there too.
  const uint64_t arrays = 2 * 8 * kSubGroup * 4 * 3;
  const uint64_t from = trace.BytesOf("device 0", "from device") +
                        trace.BytesOf("device 1", "from device");
  const uint64_t to = trace.BytesOf("device 0", "to device") +
                      trace.BytesOf("device 1", "to device");
  EXPECT_GE(from, arrays);
  EXPECT_GE(to, from + 2 * 8 * kSubGroup * 4);
}

TEST(JobTraceTest, ItBeginsWithAStepAndNotWithin) {
  const auto job = Start(MemorySetup());
  job->SetGradients(job->RandomTensors(kSeed + 1));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(job->Push(rank, 1, 0, 2).ok());
  }
  BackgroundTrace trace(job.get(), 1);
  const std::vector<Hyperparams> groups(
      1, DefaultHyperparams(job->layout().optimizer()));
  EXPECT_TRUE(job->CommitAll(SpecOf(1, groups)).status.ok());
  Train(job.get(), 2, 2);
  ASSERT_TRUE(trace.Join().ok());
  EXPECT_EQ(trace.steps(), 1u);
  EXPECT_EQ(trace.StepsOf("steps"), std::set<uint64_t>{2});
  EXPECT_EQ(trace.StepsOf("workers"), std::set<uint64_t>{2});
}

TEST(JobTraceTest, OneAtATimeAndAgain) {
  const auto job = Start(MemorySetup());
  BackgroundTrace first(job.get(), 1);
  BackgroundTrace second(job.get(), 1);
  const absl::Status refused = second.Join();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another trace"));
  Train(job.get(), 1, 1);
  EXPECT_TRUE(first.Join().ok());
  EXPECT_EQ(first.steps(), 1u);
  BackgroundTrace third(job.get(), 1);
  Train(job.get(), 2, 2);
  EXPECT_TRUE(third.Join().ok());
  EXPECT_EQ(third.StepsOf("steps"), std::set<uint64_t>{2});
}

TEST(JobTraceTest, ACallerThatGoesAwayEndsIt) {
  const auto job = Start(MemorySetup());
  BackgroundTrace trace(job.get(), 1);
  const absl::Status status = trace.Cancel();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  BackgroundTrace next(job.get(), 1);
  Train(job.get(), 1, 1);
  EXPECT_TRUE(next.Join().ok());
}

TEST(JobTraceTest, ItEndsAtTheDeadline) {
  const auto job = Start(MemorySetup());
  BackgroundTrace trace(job.get(), 1000, absl::Now());
  EXPECT_TRUE(trace.Join().ok());
  EXPECT_TRUE(trace.done());
  EXPECT_EQ(trace.steps(), 0u);
  EXPECT_EQ(trace.all().spans_size(), 0);
}

TEST(JobTraceTest, ItEndsAfterAMinuteWithoutAStep) {
  std::atomic<int64_t> ahead_s = 0;
  JobHarness::Setup setup = MemorySetup();
  setup.clock = [&ahead_s] {
    return absl::Now() + absl::Seconds(ahead_s.load());
  };
  const auto job = Start(setup);
  BackgroundTrace trace(job.get(), 1000);
  Train(job.get(), 1, 2);
  ahead_s = 3600;
  EXPECT_TRUE(trace.Join().ok());
  EXPECT_TRUE(trace.done());
  EXPECT_EQ(trace.steps(), 2u);
}

TEST(JobTraceTest, BadRequestsAreRefused) {
  JobHarness job(MemorySetup());
  BackgroundTrace early(&job, 1);
  const absl::Status no_layout = early.Join();
  EXPECT_TRUE(absl::IsFailedPrecondition(no_layout)) << no_layout;
  job.AttachAll();
  BackgroundTrace loading(&job, 1);
  const absl::Status no_state = loading.Join();
  EXPECT_TRUE(absl::IsFailedPrecondition(no_state)) << no_state;
  EXPECT_THAT(std::string(no_state.message()), HasSubstr("no state yet"));
  job.LoadMasters(job.RandomTensors(kSeed));
  job.FinishAll();
  BackgroundTrace many(&job, 1001);
  const absl::Status too_many = many.Join();
  EXPECT_TRUE(absl::IsInvalidArgument(too_many)) << too_many;
  EXPECT_THAT(std::string(too_many.message()), HasSubstr("1 to 1000"));
  job.job().BeginDrain();
  BackgroundTrace drained(&job, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(drained.Join()));
  job.job().Resume();
}

}  // namespace
}  // namespace optstate::session
