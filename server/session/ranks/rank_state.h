#ifndef OPTSTATE_SERVER_SESSION_RANKS_RANK_STATE_H_
#define OPTSTATE_SERVER_SESSION_RANKS_RANK_STATE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace optstate::session {

// The state of a rank; README.md says what leads from one to another.
enum class RankState : uint8_t {
  kAbsent,
  kAttached,  // it has a session
  kAwaited,   // it has none, and is to return by itself
};

// Returns the name as in README.md.
absl::string_view NameOf(RankState state);
// Returns whether an engine may make this transition.
bool IsTransition(RankState from, RankState to);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_RANK_STATE_H_
