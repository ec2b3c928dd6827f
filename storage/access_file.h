#ifndef OPTSTATE_STORAGE_ACCESS_FILE_H_
#define OPTSTATE_STORAGE_ACCESS_FILE_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::storage {

// Says who may use a job, besides its owner. The file is in the job's directory
// in memory, and copies of it are in the job's first folder on a disk and in
// the folder in which it sleeps: these outlive the memory. FORMAT.md has its
// bytes, which the supervisor writes (server/supervisor/job_access_file.h). A
// job for whom nobody has said anything has none.
inline constexpr char kAccessFile[] = "/access";
// The first line of the file of a job that is not private.
inline constexpr absl::string_view kOpenAccess = "access 1 open";

// Returns the text of a folder's file; nullopt: it has none. Other errors: it
// may have one that says something.
absl::StatusOr<std::optional<std::string>> ReadAccessText(
    const std::string& folder);

// Returns whether a job must not be named to others: its file does not say
// plainly that they may look at it.
bool MayBePrivate(const std::string& folder);

// Has a folder on a disk say what the job's directory says, durably.
// `is_taken_over`: what the folder says is of another job, so that it goes when
// the directory says nothing; else it stays then.
//
// The supervisor may change both files meanwhile. It writes that of the
// directory first, and this function looks at that again at its end, so that
// the folder has the last of them, whoever has written it.
absl::Status CopyAccess(const std::string& job_directory,
                        const std::string& folder, bool is_taken_over);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_ACCESS_FILE_H_
