#ifndef OPTSTATE_SERVER_SESSION_STEPS_COMMIT_COPY_H_
#define OPTSTATE_SERVER_SESSION_STEPS_COMMIT_COPY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/session/job_types.h"

namespace optstate::session {

// Keeps a commit beyond the call that brought it: owns what its spans refer to.
//
// Threads: not thread-safe. Allocates in Reset alone. A copied object's spec()
// would refer to the original, so that objects are only moved.
class CommitCopy {
 public:
  CommitCopy() = default;
  CommitCopy(CommitCopy&&) = default;
  CommitCopy& operator=(CommitCopy&&) = default;

  // Forgets the commit and takes the number of a job's groups.
  void Reset(size_t group_count) {
    groups_.assign(group_count, Hyperparams{});
    clips_with_.assign(group_count, 0);
    spec_ = {};
  }
  // Takes a commit whose content was checked.
  void Note(const CommitSpec& spec) {
    spec_ = spec;
    std::copy(spec.groups.begin(), spec.groups.end(), groups_.begin());
    spec_.groups = groups_;
    if (spec.clips_with.empty()) return;
    std::copy(spec.clips_with.begin(), spec.clips_with.end(),
              clips_with_.begin());
    spec_.clips_with = clips_with_;
  }
  const CommitSpec& spec() const { return spec_; }

 private:
  std::vector<Hyperparams> groups_;
  std::vector<uint32_t> clips_with_;
  CommitSpec spec_;  // its spans refer to the vectors above
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_COMMIT_COPY_H_
