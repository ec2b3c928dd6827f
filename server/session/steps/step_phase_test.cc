#include "server/session/steps/step_phase.h"

#include "gtest/gtest.h"
#include "server/session/testing/transition_table.h"

namespace optstate::session {
namespace {

TEST(StepPhaseTest, Transitions) {
  constexpr auto kNone = StepPhase::kNone;
  constexpr auto kOpen = StepPhase::kOpen;
  constexpr auto kDecided = StepPhase::kDecided;
  constexpr auto kPrepared = StepPhase::kPrepared;
  constexpr auto kApplying = StepPhase::kApplying;
  constexpr auto kRecorded = StepPhase::kRecorded;
  ExpectTransitions<StepPhase>({{kNone, "none"},
                                {kOpen, "open"},
                                {kDecided, "decided"},
                                {kPrepared, "prepared"},
                                {kApplying, "applying"},
                                {kRecorded, "recorded"}},
                               {{kNone, kOpen},
                                {kOpen, kDecided},
                                {kOpen, kNone},
                                {kDecided, kApplying},
                                {kDecided, kRecorded},
                                {kDecided, kPrepared},
                                {kDecided, kNone},
                                {kPrepared, kApplying},
                                {kPrepared, kRecorded},
                                {kPrepared, kNone},
                                {kApplying, kRecorded},
                                {kApplying, kNone},
                                {kRecorded, kNone}});
}

}  // namespace
}  // namespace optstate::session
