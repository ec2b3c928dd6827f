#ifndef OPTSTATE_SERVER_SESSION_TESTING_TWO_PHASE_FIXTURE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_TWO_PHASE_FIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "proto/types/status_macros.h"
#include "server/session/testing/job_crash_fixture.h"

namespace optstate::session {

// A job whose ranks prepare step 3 and take the step by a verdict.
class TwoPhaseTest : public JobCrashTest,
                     public ::testing::WithParamInterface<Case> {
 protected:
  TwoPhaseTest() : JobCrashTest(TwoRanks(GetParam())) {}

  CommitSpec TwoPhaseCommit() const {
    CommitSpec spec = CommitOf(3);
    spec.two_phase = true;
    return spec;
  }
  // Prepares step 3 without the max_norm that it has on one node.
  StepOutcome PrepareUnclipped() {
    CommitSpec spec = TwoPhaseCommit();
    spec.max_norm = 0;
    spec.awaits_norm = true;
    return Prepare(spec);
  }
  StepOutcome Prepare() { return Prepare(TwoPhaseCommit()); }
  StepOutcome Prepare(const CommitSpec& spec) {
    PushStep3(&harness_);
    const RecordingListener::Answer answer = harness_.CommitAll(spec);
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_TRUE(answer.outcome.prepared);
    EXPECT_NE(answer.outcome.digest, 0u);
    digest_ = answer.outcome.digest;
    return answer.outcome;
  }
  StepVerdict VerdictOf(Verdict verdict) const {
    return {.step = 3, .digest = digest_, .verdict = verdict};
  }
  // Returns the clipping with which the step is what it is on one node.
  StepVerdict ClippedAsOnOneNode(const StepOutcome& prepared) const {
    StepVerdict verdict = VerdictOf(Verdict::kClip);
    verdict.gradient_norm = prepared.gradient_norm;
    verdict.clip_coefficient =
        CommitOf(3).max_norm / (prepared.gradient_norm + 1e-6);
    return verdict;
  }
  // Returns the verdict about the step that is clipped so.
  StepVerdict ClippedVerdict(const StepVerdict& clipping,
                             Verdict verdict = Verdict::kCommit) const {
    return {.step = 3,
            .digest = ClippedDigest(digest_, clipping.gradient_norm,
                                    clipping.clip_coefficient),
            .verdict = verdict};
  }
  // Returns the sums of squares of the prepared step, by parameter.
  absl::StatusOr<std::vector<double>> PreparedSums() {
    std::vector<double> sums(3);
    OPTSTATE_RETURN_IF_ERROR(
        harness_.job()
            .Fetch(v1::STATE_ARRAY_PREPARED_SUM, 0, 0, sums.size(),
                   absl::MakeSpan(reinterpret_cast<std::byte*>(sums.data()),
                                  sums.size() * sizeof(double)))
            .status());
    return sums;
  }
  // Returns the answer to the rank, which must have come.
  RecordingListener::Answer Decide(uint32_t rank, const StepVerdict& verdict) {
    const uint64_t request = 1000 + next_request_++;
    harness_.job().Decide(rank, request, verdict);
    const auto* answer = harness_.AnswerTo(rank, request);
    EXPECT_NE(answer, nullptr);
    return answer == nullptr ? RecordingListener::Answer() : *answer;
  }
  std::optional<StepOutcome> Prepared() {
    const auto position = harness_.job().Position();
    EXPECT_TRUE(position.ok()) << position.status();
    return position.ok() ? position->prepared : std::nullopt;
  }
  bool IsClipped() {
    const auto position = harness_.job().Position();
    return position.ok() && position->prepared_is_clipped;
  }
  // Attaches all ranks, each with the gradients of step 3 in a segment.
  void AttachWithSegments() {
    harness_.DetachAll();
    if (GetParam() == Case::kRanksLackGradients) {
      SetGradientsOfRanks(&harness_);
    } else {
      RememberGradients();
    }
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(harness_.Register(rank).ok());
      segments_.push_back(harness_.KeepGradients(rank, 4096));
      AttachSpec spec = harness_.AttachSpecOf(rank);
      spec.gradient_segment = segments_.back().segment.get();
      spec.gradient_offset_bytes = segments_.back().gradient_offset_bytes;
      ASSERT_TRUE(harness_.job().Attach(spec).ok());
    }
  }

  // Has another engine finish step 3 as on one node.
  void FinishWithTheNextEngine() {
    ASSERT_TRUE(harness_.Open().ok());
    if (GetParam() == Case::kRanksLackGradients) {
      SetGradientsOfRanks(&harness_);
    } else {
      RememberGradients();
    }
    const bool needs_gradients = GetParam() != Case::kAccumulate;
    EXPECT_EQ(absl::IsUnavailable(harness_.job().Position().status()),
              needs_gradients);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(harness_.Register(rank).ok());
      ASSERT_TRUE(harness_.Attach(rank).ok());
    }
    EXPECT_EQ(committed_step(), 3);
    EXPECT_TRUE(harness_.StateBytes() == expected_);
  }

  std::vector<KeptGradients> segments_;  // by rank
  uint64_t digest_ = 0;
  uint64_t next_request_ = 0;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_TWO_PHASE_FIXTURE_H_
