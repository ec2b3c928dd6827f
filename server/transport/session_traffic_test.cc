#include "server/transport/session_traffic.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "absl/status/status.h"
#include "proto/types/dtype.h"
#include "proto/types/partition.h"
#include "server/session/wire_counters.h"
#include "server/transport/test_layout.h"

namespace optstate::transport {
namespace {

class SessionTrafficTest : public testing::Test {
 protected:
  static session::StepOutcome Outcome(uint64_t step, bool applied) {
    session::StepOutcome outcome;
    outcome.step = step;
    outcome.applied = applied;
    return outcome;
  }
  static uint64_t GradientBytes(const Layout& layout, size_t parameter) {
    const auto& one = layout.parameters()[parameter];
    return static_cast<uint64_t>(one.numel) * SizeInBytes(one.gradient_dtype);
  }

  const Layout layout_ = TestLayout();
  const RankPartition partition_ =
      MakeRankPartition(layout_, PartitionMode::kGreedy, 1, 0).value();
  session::WireCounters::Counts counts_;
  SessionTraffic traffic_{&counts_};
};

TEST_F(SessionTrafficTest, PushesCountTheirGradients) {
  traffic_.CountPush(0, 1);  // not attached
  EXPECT_EQ(counts_.gradient_bytes.load(), 0u);
  traffic_.Attach(layout_, partition_, 0);
  traffic_.CountPush(1, 1);
  EXPECT_EQ(counts_.gradient_bytes.load(), GradientBytes(layout_, 1));
  const auto count = static_cast<uint32_t>(layout_.parameters().size());
  uint64_t all = 0;
  for (uint32_t i = 0; i < count; ++i) all += GradientBytes(layout_, i);
  const uint64_t before = counts_.gradient_bytes.load();
  traffic_.CountPush(0, count);
  EXPECT_EQ(counts_.gradient_bytes.load(), before + all);
  // Beyond what the rank knew when it attached.
  traffic_.CountPush(count, 5);
  traffic_.CountPush(UINT32_MAX, UINT32_MAX);
  EXPECT_EQ(counts_.gradient_bytes.load(), before + all);
}

// Another rank's pieces are not this one's.
TEST_F(SessionTrafficTest, OnlyTheRanksOwnPiecesCount) {
  uint64_t both = 0;
  uint64_t all = 0;
  const auto count = static_cast<uint32_t>(layout_.parameters().size());
  for (uint32_t i = 0; i < count; ++i) all += GradientBytes(layout_, i);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    session::WireCounters::Counts counts;
    SessionTraffic traffic(&counts);
    traffic.Attach(
        layout_,
        MakeRankPartition(layout_, PartitionMode::kGreedy, 2, rank).value(), 0);
    traffic.CountPush(0, count);
    EXPECT_LT(counts.gradient_bytes.load(), all);
    both += counts.gradient_bytes.load();
  }
  EXPECT_EQ(both, all);
}

TEST_F(SessionTrafficTest, AnAppliedStepPublishesTheParameters) {
  traffic_.Attach(layout_, partition_, 100);
  traffic_.CountPublished(absl::OkStatus(), Outcome(1, true));
  EXPECT_EQ(counts_.sent_bytes.load(), 100u);
  traffic_.CountPublished(absl::OkStatus(), Outcome(2, false));  // skipped
  traffic_.CountPublished(absl::OkStatus(), Outcome(0, true));   // a load
  traffic_.CountPublished(absl::AbortedError("x"), Outcome(3, true));
  EXPECT_EQ(counts_.sent_bytes.load(), 100u);
  traffic_.CountSent(5);
  traffic_.CountLoaded(7);
  EXPECT_EQ(counts_.sent_bytes.load(), 105u);
  EXPECT_EQ(counts_.load_bytes.load(), 7u);
}

TEST_F(SessionTrafficTest, AnAnswerThatRefusesIsCounted) {
  traffic_.CountAnswer(absl::OkStatus());
  traffic_.CountAnswer(absl::AbortedError("x"));
  traffic_.CountAnswer(absl::AbortedError("y"));
  const auto count_of = [this](absl::StatusCode code) {
    return counts_.refused[static_cast<size_t>(code)].load();
  };
  EXPECT_EQ(count_of(absl::StatusCode::kOk), 0u);
  EXPECT_EQ(count_of(absl::StatusCode::kAborted), 2u);
}

TEST_F(SessionTrafficTest, NothingIsCountedWithoutCounters) {
  SessionTraffic traffic(nullptr);
  traffic.Attach(layout_, partition_, 100);
  traffic.CountPush(0, 1);
  traffic.CountPublished(absl::OkStatus(), Outcome(1, true));
  traffic.CountSent(5);
  traffic.CountLoaded(7);
  traffic.CountAnswer(absl::AbortedError("x"));
  EXPECT_EQ(traffic.counts(), nullptr);
}

}  // namespace
}  // namespace optstate::transport
