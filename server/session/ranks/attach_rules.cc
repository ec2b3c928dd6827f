#include "server/session/ranks/attach_rules.h"

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::session {

absl::Status CheckAttach(const AttachSpec& spec, const AttachFacts& facts,
                         absl::FunctionRef<absl::Status()> check_held) {
  if (spec.rank >= facts.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", spec.rank, " of a world of ", facts.world_size));
  }
  if (spec.comes_back && !facts.was_attached_last) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", spec.rank, " of job \"", facts.job,
        "\" was another session's since this one lost its connection, or the "
        "job was made anew: open a new session"));
  }
  if (facts.draining && !facts.was_attached_last) {
    return absl::UnavailableError(absl::StrCat(
        "job \"", facts.job, "\" is draining and takes no new sessions"));
  }
  if (spec.layout_hash != facts.layout_hash) {
    return absl::FailedPreconditionError(
        "the job has another layout than this rank: register it again");
  }
  if (spec.shape != 0 && spec.shape != facts.shape) {
    return absl::FailedPreconditionError(
        absl::StrCat("job \"", facts.job,
                     "\" was registered with other settings since rank ",
                     spec.rank, " registered: register again"));
  }
  if (facts.attached_pid.has_value()) {
    return absl::AlreadyExistsError(absl::StrCat(
        "rank ", spec.rank, " of job \"", facts.job,
        "\" is attached already, by process ", *facts.attached_pid));
  }
  if (!facts.was_attached_last) OPTSTATE_RETURN_IF_ERROR(check_held());
  if (spec.listener == nullptr ||
      (spec.gradient_area == nullptr && facts.gradient_bytes != 0)) {
    return absl::InvalidArgumentError("no listener or no gradient area");
  }
  if (spec.gradient_area_bytes < facts.gradient_bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the gradients of rank ", spec.rank, " of job \"", facts.job,
        "\" take ", facts.gradient_bytes, " bytes, there is room for ",
        spec.gradient_area_bytes, ": register again"));
  }
  return absl::OkStatus();
}

}  // namespace optstate::session
