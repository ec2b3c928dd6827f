#include "server/session/ranks/rank_state.h"

#include "gtest/gtest.h"
#include "server/session/testing/transition_table.h"

namespace optstate::session {
namespace {

TEST(RankStateTest, Transitions) {
  constexpr auto kAbsent = RankState::kAbsent;
  constexpr auto kAttached = RankState::kAttached;
  constexpr auto kAwaited = RankState::kAwaited;
  ExpectTransitions<RankState>(
      {{kAbsent, "absent"}, {kAttached, "attached"}, {kAwaited, "awaited"}},
      {{kAbsent, kAttached},
       {kAttached, kAbsent},
       {kAttached, kAwaited},
       {kAwaited, kAttached},
       {kAwaited, kAbsent}});
}

}  // namespace
}  // namespace optstate::session
