#ifndef OPTSTATE_SERVER_SESSION_TESTING_TRANSITION_TABLE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_TRANSITION_TABLE_H_

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/session/transition_check.h"

namespace optstate::session {

// Expects these names of a state's enum, and that CheckTransition() permits
// exactly these pairs of states, a state after itself included, and ends the
// process with both names for the others.
template <typename State>
void ExpectTransitions(const std::map<State, std::string>& names,
                       const std::set<std::pair<State, State>>& table) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (const auto& [from, from_name] : names) {
    EXPECT_EQ(NameOf(from), from_name);
    for (const auto& [to, to_name] : names) {
      const std::string pair = absl::StrCat(from_name, " to ", to_name);
      const bool is_legal = table.count({from, to}) != 0;
      EXPECT_EQ(IsTransition(from, to), is_legal) << pair;
      if (!is_legal) {
        EXPECT_DEATH(CheckTransition("subject", 7, from, to),
                     absl::StrCat("subject 7 cannot go from ", pair));
      } else if (IsTransition(from, to)) {
        CheckTransition("subject", 7, from, to);  // returns
      }
    }
  }
}

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_TRANSITION_TABLE_H_
