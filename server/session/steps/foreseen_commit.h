#ifndef OPTSTATE_SERVER_SESSION_STEPS_FORESEEN_COMMIT_H_
#define OPTSTATE_SERVER_SESSION_STEPS_FORESEEN_COMMIT_H_

#include <cstddef>

#include "server/session/job_types.h"
#include "server/session/steps/commit_copy.h"

namespace optstate::session {

// Guesses what the next commit asks for, and whether its step is plain: neither
// skipped nor clipped. The guess is that the next step is as the last kSteps
// were, when these were all plain and their commits equal. It takes as many
// because a wrong guess costs several times what a right one saves. So nothing
// is foreseen for a job whose hyperparameters change with each step, or which
// is clipped now and then.
//
// Threads: not thread-safe. Allocates in Reset alone.
class ForeseenCommit {
 public:
  static constexpr int kSteps = 8;

  // Forgets all commits and takes the number of a job's groups.
  void Reset(size_t group_count);
  // Takes the content of a commit whose step was decided.
  void Note(const CommitSpec& spec, bool is_plain);
  // Notes that what was begun of a step had to be rolled back although its
  // commit was as foreseen: nothing is foreseen in the next kSteps steps.
  void NoteRolledBack();
  // Returns null while nothing is foreseen. The commit has no step.
  const CommitSpec* spec() const {
    return equal_steps_ >= kSteps ? &last_.spec() : nullptr;
  }
  // Says whether the next step is expected to be plain; the first steps are.
  bool is_plain() const { return plain_steps_ >= kSteps; }

 private:
  CommitCopy last_;
  int equal_steps_ = 0;       // plain ones with equal commits, up to kSteps
  int plain_steps_ = kSteps;  // since one that was not, up to kSteps
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_STEPS_FORESEEN_COMMIT_H_
