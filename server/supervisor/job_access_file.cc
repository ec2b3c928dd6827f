#include "server/supervisor/job_access_file.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/types/status_macros.h"
#include "server/access/job_access.h"
#include "storage/access_file.h"
#include "storage/disk_folder.h"
#include "storage/format/sealed_text.h"

namespace optstate::supervisor {
namespace {

constexpr absl::string_view kPrivate = "access 1 private";
constexpr absl::string_view kGroup = "group ";
constexpr absl::string_view kReader = "reader ";

absl::Status IsDamaged(absl::string_view why) {
  return absl::DataLossError(absl::StrCat("is damaged: ", why));
}

}  // namespace

std::string FormatAccess(const v1::JobAccess& access) {
  std::string text =
      absl::StrCat(access.is_private() ? kPrivate : storage::kOpenAccess, "\n");
  if (!access.group().empty()) {
    absl::StrAppend(&text, kGroup, access.group(), "\n");
  }
  for (const std::string& reader : access.readers()) {
    absl::StrAppend(&text, kReader, reader, "\n");
  }
  return storage::SealText(text);
}

absl::StatusOr<v1::JobAccess> ParseAccess(absl::string_view text) {
  // A text that was cut off could say less than was written, so the seal is
  // not optional here.
  if (!storage::IsSealed(text)) {
    return IsDamaged("its seal is missing, or is not that of its text");
  }
  OPTSTATE_ASSIGN_OR_RETURN(const absl::string_view said,
                            storage::UnsealText(text));
  v1::JobAccess access;
  const std::vector<absl::string_view> lines =
      absl::StrSplit(absl::StripSuffix(said, "\n"), '\n');
  if (lines[0] != storage::kOpenAccess && lines[0] != kPrivate) {
    return IsDamaged(absl::StrCat("it begins with neither \"",
                                  storage::kOpenAccess, "\" nor \"", kPrivate,
                                  "\""));
  }
  access.set_is_private(lines[0] == kPrivate);
  for (size_t i = 1; i < lines.size(); ++i) {
    absl::string_view line = lines[i];
    if (absl::ConsumePrefix(&line, kReader)) {
      access.add_readers(std::string(line));
    } else if (access.group().empty() && absl::ConsumePrefix(&line, kGroup)) {
      access.set_group(std::string(line));
    } else {
      return IsDamaged(absl::StrCat("line ", i + 1, " is not understood"));
    }
  }
  const absl::Status form = access::CheckAccessForm(access);
  if (!form.ok()) return IsDamaged(form.message());
  return access;
}

KnownAccess UnknownAccess(const absl::Status& why) {
  KnownAccess known;
  known.access.set_is_private(true);
  known.problem = absl::StrCat(
      why.message(),
      "; until `optctl set job NAME private=...` says who may use the job, it "
      "is private to its owner");
  return known;
}

KnownAccess ReadAccess(const std::string& folder) {
  const absl::StatusOr<std::optional<std::string>> text =
      storage::ReadAccessText(folder);
  if (!text.ok()) return UnknownAccess(text.status());
  if (!text->has_value()) return {};
  absl::StatusOr<v1::JobAccess> access = ParseAccess(**text);
  if (access.ok()) return {.access = *std::move(access), .problem = ""};
  return UnknownAccess(absl::Status(
      access.status().code(), absl::StrCat(folder, storage::kAccessFile, " ",
                                           access.status().message())));
}

absl::Status WriteAccess(const std::string& folder,
                         const v1::JobAccess& access) {
  return storage::WriteDurably(folder + storage::kAccessFile,
                               FormatAccess(access));
}

}  // namespace optstate::supervisor
