#include "server/observe/trace_recorder.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::observe {
namespace {

LaneName NameLane(uint32_t lane) {
  return {"group", absl::StrCat("lane ", lane)};
}

// All chunks of a trace, as one whose lanes are checked.
class TakenTrace {
 public:
  // Takes all: ends only when spans do not come faster than they are taken.
  void TakeFrom(TraceRecorder* recorder) {
    while (TakeChunk(recorder)) {
    }
  }
  // Returns whether there may be more.
  bool TakeChunk(TraceRecorder* recorder) {
    v1::TraceChunk chunk;
    const bool is_more = recorder->Take(&chunk);
    EXPECT_LE(chunk.spans_size(), TraceRecorder::kChunkSpansMax);
    all_.MergeFrom(chunk);
    lost_ += chunk.lost_spans();
    return is_more;
  }
  const v1::TraceChunk& all() const { return all_; }
  uint64_t lost() const { return lost_; }
  std::string LaneOf(const v1::TraceSpan& span) const {
    EXPECT_LT(span.lane(), static_cast<uint32_t>(all_.lanes_size()));
    return all_.lanes(static_cast<int>(span.lane())).name();
  }
  // Returns whether no two spans of a lane overlap.
  bool IsInLine() const {
    std::map<uint32_t, std::vector<std::pair<int64_t, int64_t>>> by_lane;
    for (const v1::TraceSpan& span : all_.spans()) {
      by_lane[span.lane()].emplace_back(span.begin_ns(),
                                        span.begin_ns() + span.duration_ns());
    }
    for (auto& [lane, spans] : by_lane) {
      std::sort(spans.begin(), spans.end());
      for (size_t i = 1; i < spans.size(); ++i) {
        if (spans[i].first < spans[i - 1].second) return false;
      }
    }
    return true;
  }

 private:
  v1::TraceChunk all_;
  uint64_t lost_ = 0;
};

class TraceRecorderTest : public testing::Test {
 protected:
  void Begin(uint32_t steps) {
    ASSERT_TRUE(recorder_.Begin(steps).ok());
    recorder_.Arm();
  }
  static Span At(int64_t begin_ns, int64_t end_ns, uint32_t lane = 0) {
    return {"update", lane, begin_ns, end_ns, 7, 0};
  }

  TraceRecorder recorder_;
};

TEST_F(TraceRecorderTest, RecordsNothingUnlessATraceIsUnderWay) {
  TraceSource source(&recorder_, &NameLane);
  EXPECT_FALSE(source.on());
  EXPECT_EQ(source.Begin(), 0);
  { const ScopedSpan span(&source, "update"); }
  source.Record(At(1, 2));
  Begin(1);
  recorder_.BeginStep(5);
  TakenTrace trace;
  trace.TakeFrom(&recorder_);
  EXPECT_EQ(trace.all().spans_size(), 0);
  recorder_.Disarm();
  recorder_.End();
}

TEST_F(TraceRecorderTest, ASourceMayBeAbsent) {
  Begin(1);
  recorder_.BeginStep(5);
  { const ScopedSpan span(nullptr, "update"); }
  TakenTrace trace;
  trace.TakeFrom(&recorder_);
  EXPECT_EQ(trace.all().spans_size(), 0);
  EXPECT_EQ(trace.lost(), 0u);
  recorder_.Disarm();
  recorder_.End();
}

TEST_F(TraceRecorderTest, ItsTimeIsFromTheFirstStepToTheEndOfTheLast) {
  TraceSource source(&recorder_, &NameLane);
  Begin(2);
  recorder_.EndStep();  // was open before the trace
  const int64_t before_ns = source.Begin();
  ASSERT_NE(before_ns, 0);
  source.Record(At(before_ns - 2, before_ns - 1));
  recorder_.BeginStep(8);
  EXPECT_EQ(source.step(), 8u);
  source.RecordSince(before_ns, "push", 1, 64);
  { const ScopedSpan span(&source, "update"); }
  recorder_.EndStep();
  EXPECT_EQ(recorder_.steps(), 1u);
  EXPECT_FALSE(recorder_.is_over());
  recorder_.BeginStep(9);
  const int64_t last_ns = source.Begin();
  source.Record({"update", 0, last_ns, TraceNowNs(), source.step(), 0});
  recorder_.EndStep();
  EXPECT_TRUE(recorder_.is_over());
  EXPECT_EQ(recorder_.steps(), 2u);
  EXPECT_FALSE(source.on());
  source.Record(At(TraceNowNs() + 1000, TraceNowNs() + 2000));
  recorder_.BeginStep(10);
  EXPECT_EQ(source.step(), 9u);

  TakenTrace trace;
  trace.TakeFrom(&recorder_);
  ASSERT_EQ(trace.all().spans_size(), 3);
  const v1::TraceSpan& push = trace.all().spans(0);
  EXPECT_EQ(push.name(), "push");
  EXPECT_EQ(push.step(), 8u);
  EXPECT_EQ(push.bytes(), 64u);
  EXPECT_EQ(trace.LaneOf(push), "lane 1");
  // It began before the step, and is cut there.
  EXPECT_GE(trace.all().spans(1).begin_ns(), push.begin_ns());
  EXPECT_EQ(trace.all().spans(2).step(), 9u);
  EXPECT_NE(trace.all().began_at_ns(), 0);
  for (const v1::TraceSpan& span : trace.all().spans()) {
    EXPECT_GE(span.begin_ns(), 0);
    EXPECT_GE(span.duration_ns(), 0);
  }
  recorder_.End();
}

TEST_F(TraceRecorderTest, OneAtATime) {
  Begin(1);
  EXPECT_TRUE(absl::IsFailedPrecondition(recorder_.Begin(1)));
  recorder_.Disarm();
  recorder_.End();
  Begin(1);
  recorder_.Disarm();
  recorder_.End();
}

TEST_F(TraceRecorderTest, SpansThatOverlapGetLanesOfTheirOwn) {
  TraceSource source(&recorder_, &NameLane);
  Begin(1);
  recorder_.BeginStep(1);
  const int64_t now_ns = TraceNowNs();
  source.Record(At(now_ns, now_ns + 10));
  source.Record(At(now_ns + 5, now_ns + 15));
  source.Record(At(now_ns + 10, now_ns + 20));
  source.Record(At(now_ns + 12, now_ns + 13, 1));
  TakenTrace trace;
  trace.TakeFrom(&recorder_);
  ASSERT_EQ(trace.all().spans_size(), 4);
  EXPECT_TRUE(trace.IsInLine());
  ASSERT_EQ(trace.all().lanes_size(), 3);
  EXPECT_EQ(trace.all().lanes(0).group(), "group");
  EXPECT_EQ(trace.all().lanes(0).name(), "lane 0");
  EXPECT_EQ(trace.all().lanes(1).name(), "lane 0 (2)");
  EXPECT_EQ(trace.all().lanes(2).name(), "lane 1");
  EXPECT_EQ(trace.all().spans(2).lane(), 0u);
  recorder_.Disarm();
  recorder_.End();
}

TEST_F(TraceRecorderTest, TooManyAtOnceAreLost) {
  TraceSource source(&recorder_, &NameLane);
  Begin(1);
  recorder_.BeginStep(1);
  const int64_t now_ns = TraceNowNs();
  for (int i = 0; i < 100; ++i) source.Record(At(now_ns, now_ns + 10));
  TakenTrace trace;
  trace.TakeFrom(&recorder_);
  EXPECT_EQ(trace.all().lanes_size(), 64);
  EXPECT_EQ(trace.all().spans_size(), 64);
  EXPECT_EQ(trace.lost(), 36u);
  recorder_.Disarm();
  recorder_.End();
}

TEST_F(TraceRecorderTest, AFullRingLosesSpansAndCountsThem) {
  TraceSource source(&recorder_, &NameLane);
  Begin(1);
  recorder_.BeginStep(1);
  constexpr uint64_t kSpans = TraceRecorder::kRingSpansMax + 100;
  for (uint64_t i = 0; i < kSpans; ++i) {
    const int64_t now_ns = TraceNowNs();
    source.Record(At(now_ns, now_ns + 1));
  }
  TakenTrace trace;
  trace.TakeFrom(&recorder_);
  EXPECT_EQ(trace.lost(), 100u);
  EXPECT_EQ(static_cast<uint64_t>(trace.all().spans_size()), kSpans - 100);
  recorder_.Disarm();
  recorder_.End();
}

TEST_F(TraceRecorderTest, SourcesMayComeAndGoWithinATrace) {
  auto gone = std::make_unique<TraceSource>(&recorder_, &NameLane);
  Begin(1);
  recorder_.BeginStep(1);
  { const ScopedSpan span(gone.get(), "update"); }
  gone = nullptr;
  TraceSource late(&recorder_, [](uint32_t) -> LaneName {
    return {"group", "late"};
  });
  { const ScopedSpan span(&late, "update"); }
  TakenTrace trace;
  trace.TakeFrom(&recorder_);
  ASSERT_EQ(trace.all().spans_size(), 2);
  EXPECT_EQ(trace.LaneOf(trace.all().spans(0)), "lane 0");
  EXPECT_EQ(trace.LaneOf(trace.all().spans(1)), "late");
  recorder_.Disarm();
  recorder_.End();
}

// Another trace knows nothing of the one before, nor does its ring.
TEST_F(TraceRecorderTest, ATraceBeginsAnew) {
  TraceSource source(&recorder_, &NameLane);
  Begin(1);
  recorder_.BeginStep(1);
  { const ScopedSpan span(&source, "update"); }
  recorder_.EndStep();
  recorder_.End();
  Begin(1);
  EXPECT_FALSE(recorder_.is_over());
  EXPECT_EQ(recorder_.steps(), 0u);
  recorder_.BeginStep(2);
  TakenTrace trace;
  trace.TakeFrom(&recorder_);
  EXPECT_EQ(trace.all().spans_size(), 0);
  { const ScopedSpan span(&source, "update"); }
  trace.TakeFrom(&recorder_);
  EXPECT_EQ(trace.all().spans_size(), 1);
  EXPECT_EQ(trace.all().lanes_size(), 1);
  recorder_.Disarm();
  recorder_.End();
}

// Threads record all the time while traces begin and end: no span is torn, none
// is lost without being counted, and a ring is never used after its end, which
// the sanitizers would see.
TEST_F(TraceRecorderTest, ManyThreadsRecordWhileTracesBeginAndEnd) {
  constexpr size_t kThreads = 4;
  constexpr int kTraces = 200;
  std::atomic<bool> stops{false};
  std::vector<std::thread> threads;
  std::atomic<size_t> ready{0};
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      TraceSource source(&recorder_, [t](uint32_t) -> LaneName {
        return {"threads", absl::StrCat("thread ", t)};
      });
      ++ready;
      uint64_t recorded = 0;
      while (!stops) {
        const int64_t begin_ns = source.Begin();
        if (begin_ns == 0) continue;
        // Torn spans do not fit together.
        source.Record({"update", 0, begin_ns, TraceNowNs(), t + 1,
                       (t + 1) * 1000 + ++recorded % 1000});
      }
    });
  }
  while (ready < kThreads) std::this_thread::yield();
  uint64_t spans = 0;
  for (int i = 0; i < kTraces; ++i) {
    Begin(1);
    recorder_.BeginStep(static_cast<uint64_t>(i) + 1);
    TakenTrace trace;
    // The last trace goes on until something has come.
    do {
      trace.TakeChunk(&recorder_);
    } while (i + 1 == kTraces && trace.all().spans_size() == 0);
    if (i % 2 == 0) {
      recorder_.EndStep();
    } else {
      recorder_.Disarm();
    }
    trace.TakeFrom(&recorder_);
    recorder_.End();
    EXPECT_TRUE(trace.IsInLine());
    for (const v1::TraceSpan& span : trace.all().spans()) {
      ASSERT_EQ(span.bytes() / 1000, span.step());
      ASSERT_EQ(trace.LaneOf(span), absl::StrCat("thread ", span.step() - 1));
    }
    spans += static_cast<uint64_t>(trace.all().spans_size());
  }
  stops = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(spans, 0u);
}

}  // namespace
}  // namespace optstate::observe
