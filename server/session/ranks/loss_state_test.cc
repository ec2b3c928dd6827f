#include "server/session/ranks/loss_state.h"

#include "gtest/gtest.h"
#include "server/session/testing/transition_table.h"

namespace optstate::session {
namespace {

TEST(LossStateTest, Transitions) {
  constexpr auto kNone = LossState::kNone;
  constexpr auto kNotNotified = LossState::kNotNotified;
  constexpr auto kNotified = LossState::kNotified;
  constexpr auto kAcknowledged = LossState::kAcknowledged;
  ExpectTransitions<LossState>({{kNone, "none"},
                                {kNotNotified, "not notified"},
                                {kNotified, "notified"},
                                {kAcknowledged, "acknowledged"}},
                               {{kNone, kNotNotified},
                                {kNone, kAcknowledged},
                                {kNotNotified, kNotified},
                                {kNotNotified, kAcknowledged},
                                {kNotNotified, kNone},
                                {kNotified, kAcknowledged},
                                {kNotified, kNotNotified},
                                {kNotified, kNone},
                                {kAcknowledged, kNotNotified},
                                {kAcknowledged, kNone}});
}

}  // namespace
}  // namespace optstate::session
