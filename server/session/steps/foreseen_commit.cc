#include "server/session/steps/foreseen_commit.h"

#include <algorithm>

#include "server/session/steps/commit_content.h"

namespace optstate::session {

void ForeseenCommit::Reset(size_t group_count) {
  last_.Reset(group_count);
  equal_steps_ = 0;
  plain_steps_ = kSteps;
}

void ForeseenCommit::Note(const CommitSpec& spec, bool is_plain) {
  plain_steps_ = is_plain ? std::min(plain_steps_ + 1, kSteps) : 0;
  const bool is_equal = equal_steps_ > 0 && AsksForTheSame(last_.spec(), spec);
  equal_steps_ = !is_plain  ? 0
                 : is_equal ? std::min(equal_steps_ + 1, kSteps)
                            : 1;
  last_.Note(spec);
}

void ForeseenCommit::NoteRolledBack() {
  equal_steps_ = 0;
  plain_steps_ = 0;
}

}  // namespace optstate::session
