#ifndef OPTSTATE_SERVER_SESSION_RANKS_ATTACH_RULES_H_
#define OPTSTATE_SERVER_SESSION_RANKS_ATTACH_RULES_H_

#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/session/job_types.h"

namespace optstate::session {

// Facts that decide whether a rank may attach: about the job, and about the
// rank when the world has it.
struct AttachFacts {
  absl::string_view job;
  uint32_t world_size = 0;
  absl::string_view layout_hash;
  uint64_t shape = 0;
  bool draining = false;
  // The instance was the last to be attached as this rank.
  bool was_attached_last = false;
  std::optional<int64_t>
      attached_pid;             // of the rank's session, if there is one
  uint64_t gradient_bytes = 0;  // of the rank's partition
};

// Returns why the rank must not attach; see Job::Attach. `check_held` says
// whether a process that is to return holds the rank's place; it is asked only
// when all else permits another session.
absl::Status CheckAttach(const AttachSpec& spec, const AttachFacts& facts,
                         absl::FunctionRef<absl::Status()> check_held);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RANKS_ATTACH_RULES_H_
