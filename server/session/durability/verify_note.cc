#include "server/session/durability/verify_note.h"

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/types/status_macros.h"
#include "storage/disk_folder.h"

namespace optstate::session {
namespace {

constexpr char kVerifiedFile[] = "/verified";

}  // namespace

absl::StatusOr<std::optional<VerifyNote>> ReadVerifyNote(
    const std::string& folder) {
  const std::string path = folder + kVerifiedFile;
  const absl::StatusOr<std::string> text = storage::ReadDiskText(path);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  OPTSTATE_RETURN_IF_ERROR(text.status());
  const std::vector<absl::string_view> words =
      absl::StrSplit(*text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  VerifyNote note;
  int64_t counted_from_ns = 0;
  if (words.size() != 8 || words[0] != "incarnation" ||
      !absl::SimpleHexAtoi(words[1], &note.incarnation) ||
      words[2] != "counted_from" ||
      !absl::SimpleAtoi(words[3], &counted_from_ns) || words[4] != "verified" ||
      !absl::SimpleAtob(words[5], &note.is_verified) || words[6] != "damaged" ||
      !absl::SimpleAtoi(words[7], &note.damaged_records)) {
    return absl::DataLossError(absl::StrCat(
        path,
        " holds no \"incarnation X counted_from T verified V damaged N\""));
  }
  note.counted_from = absl::FromUnixNanos(counted_from_ns);
  return note;
}

absl::Status WriteVerifyNote(const std::string& folder,
                             const VerifyNote& note) {
  return storage::WriteDurably(
      folder + kVerifiedFile,
      absl::StrCat("incarnation ",
                   absl::Hex(note.incarnation, absl::kZeroPad16),
                   "\ncounted_from ", absl::ToUnixNanos(note.counted_from),
                   "\nverified ", note.is_verified ? 1 : 0, "\ndamaged ",
                   note.damaged_records, "\n"));
}

}  // namespace optstate::session
