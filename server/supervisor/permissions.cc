#include "server/supervisor/permissions.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace optstate::supervisor {

namespace {

bool IsOwnerOrRoot(uid_t owner, uid_t uid) { return uid == owner || uid == 0; }

absl::Status BelongsToAnother(absl::string_view job, uid_t owner, uid_t uid,
                              absl::string_view advice) {
  return absl::PermissionDeniedError(
      absl::StrCat("job \"", job, "\" belongs to uid ", owner,
                   " and the request comes from uid ", uid, ": ", advice));
}

}  // namespace

absl::Status CheckMayJoinJob(absl::string_view job, uid_t owner, uid_t uid) {
  if (IsOwnerOrRoot(owner, uid)) return absl::OkStatus();
  return BelongsToAnother(job, owner, uid,
                          "choose another job name, or act as its owner");
}

absl::Status CheckMayChangeJob(absl::string_view job, uid_t owner, uid_t uid) {
  if (IsOwnerOrRoot(owner, uid) || uid == ::geteuid()) return absl::OkStatus();
  return BelongsToAnother(job, owner, uid,
                          "only its owner, root and the daemon's user may "
                          "delete or recover it");
}

absl::Status CheckOperator(uid_t uid) {
  if (uid == 0 || uid == ::geteuid()) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("this concerns every job: only root and the daemon's uid ",
                   ::geteuid(), " may do it, not uid ", uid));
}

}  // namespace optstate::supervisor
