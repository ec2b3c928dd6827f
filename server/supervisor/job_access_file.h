#ifndef OPTSTATE_SERVER_SUPERVISOR_JOB_ACCESS_FILE_H_
#define OPTSTATE_SERVER_SUPERVISOR_JOB_ACCESS_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/types.pb.h"

namespace optstate::supervisor {

// The content of a job's file `access` (storage/access_file.h).
struct KnownAccess {
  v1::JobAccess access;
  // Why the file cannot be used; then `access` lets nobody but the owner and
  // operators use the job.
  std::string problem;
};

// Returns the text of the file, sealed, and what a text says. DATA_LOSS: it is
// damaged, or of a later build, which may say what this one does not know.
std::string FormatAccess(const v1::JobAccess& access);
absl::StatusOr<v1::JobAccess> ParseAccess(absl::string_view text);

// Reads the file of a folder. No file is the default access.
KnownAccess ReadAccess(const std::string& folder);
// Writes it, durably.
absl::Status WriteAccess(const std::string& folder,
                         const v1::JobAccess& access);

// The access of a job for whom nothing can be read.
KnownAccess UnknownAccess(const absl::Status& why);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_JOB_ACCESS_FILE_H_
