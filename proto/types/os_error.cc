#include "proto/types/os_error.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace optstate {
namespace {

absl::StatusCode CodeOf(int error_number) {
  switch (error_number) {
    case EPIPE:
    case ESHUTDOWN:
      // Abseil's FAILED_PRECONDITION blames the caller; here the peer went
      // away, as with ECONNRESET.
      return absl::StatusCode::kUnavailable;
    default:
      return absl::ErrnoToStatusCode(error_number);
  }
}

}  // namespace

absl::Status OsError(int error_number, absl::string_view what) {
  char buffer[128];
  // GNU's strerror_r returns the text, which need not lie in the buffer.
  const char* text = strerror_r(error_number, buffer, sizeof(buffer));
  return absl::Status(
      CodeOf(error_number),
      absl::StrCat(what, ": ", text, " [errno ", error_number, "]"));
}

}  // namespace optstate
