#include "server/session/ranks/rank_state.h"

namespace optstate::session {

absl::string_view NameOf(RankState state) {
  switch (state) {
    case RankState::kAbsent:
      return "absent";
    case RankState::kAttached:
      return "attached";
    case RankState::kAwaited:
      return "awaited";
  }
  return "?";
}

bool IsTransition(RankState from, RankState to) {
  switch (from) {
    case RankState::kAbsent:
      return to == RankState::kAttached;
    case RankState::kAttached:
      return to == RankState::kAbsent || to == RankState::kAwaited;
    case RankState::kAwaited:
      return to == RankState::kAttached || to == RankState::kAbsent;
  }
  return false;
}

}  // namespace optstate::session
