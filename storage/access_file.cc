#include "storage/access_file.h"

#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "storage/disk_folder.h"

namespace optstate::storage {
namespace {

// Replaces the file by way of a name that no other process uses.
absl::Status ReplaceText(const std::string& folder, const std::string& text) {
  const std::string path = folder + kAccessFile;
  const std::string unfinished = absl::StrCat(path, ".", ::getpid());
  OPTSTATE_RETURN_IF_ERROR(WriteDurably(unfinished, text));
  if (::rename(unfinished.c_str(), path.c_str()) != 0) {
    const absl::Status status =
        OsError(errno, absl::StrCat("rename ", unfinished, " to ", path));
    ::unlink(unfinished.c_str());
    return status;
  }
  return SyncFolder(folder);
}

absl::Status RemoveText(const std::string& folder) {
  const std::string path = folder + kAccessFile;
  if (::unlink(path.c_str()) == 0) return SyncFolder(folder);
  if (errno == ENOENT) return absl::OkStatus();
  return OsError(errno, absl::StrCat("unlink ", path));
}

}  // namespace

absl::StatusOr<std::optional<std::string>> ReadAccessText(
    const std::string& folder) {
  absl::StatusOr<std::string> text = ReadDiskText(folder + kAccessFile);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  if (!text.ok()) return text.status();
  return std::make_optional(*std::move(text));
}

bool MayBePrivate(const std::string& folder) {
  const absl::StatusOr<std::optional<std::string>> text =
      ReadAccessText(folder);
  if (!text.ok()) return true;
  return text->has_value() &&
         !absl::StartsWith(**text, absl::StrCat(kOpenAccess, "\n"));
}

absl::Status CopyAccess(const std::string& job_directory,
                        const std::string& folder, bool is_taken_over) {
  while (true) {
    OPTSTATE_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                              ReadAccessText(job_directory));
    // A file that cannot be read is written anew.
    const absl::StatusOr<std::optional<std::string>> there =
        ReadAccessText(folder);
    if (text.has_value() && (!there.ok() || *there != text)) {
      OPTSTATE_RETURN_IF_ERROR(ReplaceText(folder, *text));
    } else if (!text.has_value() && is_taken_over) {
      OPTSTATE_RETURN_IF_ERROR(RemoveText(folder));
    }
    OPTSTATE_ASSIGN_OR_RETURN(const std::optional<std::string> after,
                              ReadAccessText(job_directory));
    if (after == text) return absl::OkStatus();
  }
}

}  // namespace optstate::storage
