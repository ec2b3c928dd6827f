#include "client/ctl/access_settings.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/types/access_names.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

bool IsAccessWord(const std::string& word) {
  return absl::StartsWith(word, "group=") ||
         absl::StartsWith(word, "private=") ||
         absl::StartsWith(word, "readers=");
}

absl::StatusOr<bool> ParseFlag(const std::string& value) {
  if (value == "true") return true;
  if (value == "false") return false;
  return absl::InvalidArgumentError(
      absl::StrCat("private is \"", value, "\": give true or false"));
}

}  // namespace

absl::StatusOr<std::optional<AccessChange>> ParseAccessChange(
    absl::Span<const std::string> words) {
  AccessChange change;
  size_t count = 0;
  std::string other;
  for (const std::string& word : words) {
    if (!IsAccessWord(word)) {
      other = word;
      continue;
    }
    ++count;
    const std::pair<std::string, std::string> setting =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (setting.first == "group") {
      change.group = setting.second;
    } else if (setting.first == "private") {
      OPTSTATE_ASSIGN_OR_RETURN(change.is_private, ParseFlag(setting.second));
    } else {
      std::vector<std::string> names =
          absl::StrSplit(setting.second, ',', absl::SkipEmpty());
      change.readers = std::move(names);
    }
  }
  if (count == 0) return std::nullopt;
  if (count == words.size()) return std::make_optional(std::move(change));
  return absl::InvalidArgumentError(absl::StrCat(
      "who may use a job (group, private, readers) is set alone, and \"", other,
      "\" is another setting: set that by itself"));
}

absl::StatusOr<v1::JobAccess> ChangedAccess(const v1::JobAccess& now,
                                            const AccessChange& change) {
  v1::JobAccess access = now;
  if (change.group.has_value()) access.set_group(*change.group);
  if (change.is_private.has_value()) access.set_is_private(*change.is_private);
  if (change.readers.has_value()) {
    *access.mutable_readers() = {change.readers->begin(),
                                 change.readers->end()};
  } else if (!access.is_private()) {
    access.clear_readers();
  }
  const std::vector<std::string> readers(access.readers().begin(),
                                         access.readers().end());
  OPTSTATE_RETURN_IF_ERROR(
      CheckAccessNames(access.group(), access.is_private(), readers));
  return access;
}

std::string AccessText(const v1::JobAccess& access) {
  std::string text = access.is_private() ? "private" : "not private";
  if (!access.group().empty()) {
    absl::StrAppend(&text, "; group ", access.group());
  }
  if (!access.readers().empty()) {
    absl::StrAppend(&text, "; readers ", absl::StrJoin(access.readers(), ", "));
  }
  return text;
}

}  // namespace optstate::ctl
