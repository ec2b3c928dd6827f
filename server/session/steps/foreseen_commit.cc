#include "server/session/steps/foreseen_commit.h"

#include <algorithm>

#include "server/session/steps/commit_content.h"

namespace optstate::session {

void ForeseenCommit::Reset(size_t group_count) {
  groups_.assign(group_count, Hyperparams{});
  clips_with_.assign(group_count, 0);
  equal_steps_ = 0;
  plain_steps_ = kSteps;
}

void ForeseenCommit::Note(const CommitSpec& spec, bool is_plain) {
  plain_steps_ = is_plain ? std::min(plain_steps_ + 1, kSteps) : 0;
  const bool is_equal = equal_steps_ > 0 && AsksForTheSame(last_, spec);
  equal_steps_ = !is_plain  ? 0
                 : is_equal ? std::min(equal_steps_ + 1, kSteps)
                            : 1;
  last_ = spec;
  std::copy(spec.groups.begin(), spec.groups.end(), groups_.begin());
  last_.groups = groups_;
  if (!spec.clips_with.empty()) {
    std::copy(spec.clips_with.begin(), spec.clips_with.end(),
              clips_with_.begin());
    last_.clips_with = clips_with_;
  }
}

void ForeseenCommit::NoteTakenBack() {
  equal_steps_ = 0;
  plain_steps_ = 0;
}

}  // namespace optstate::session
