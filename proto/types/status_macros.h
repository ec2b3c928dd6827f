#ifndef OPTSTATE_PROTO_TYPES_STATUS_MACROS_H_
#define OPTSTATE_PROTO_TYPES_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

// The macro of newer Abseil versions, which Debian's Abseil lacks.
#define OPTSTATE_RETURN_IF_ERROR(expr)                   \
  do {                                                   \
    absl::Status optstate_status_ = (expr);              \
    if (!optstate_status_.ok()) return optstate_status_; \
  } while (false)

#define OPTSTATE_ASSIGN_OR_RETURN(lhs, expr) \
  OPTSTATE_ASSIGN_OR_RETURN_IMPL_(           \
      OPTSTATE_STATUS_CONCAT_(optstate_statusor_, __LINE__), lhs, expr)
#define OPTSTATE_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                                    \
  if (!statusor.ok()) return statusor.status();              \
  lhs = *std::move(statusor)
#define OPTSTATE_STATUS_CONCAT_(a, b) OPTSTATE_STATUS_CONCAT_IMPL_(a, b)
#define OPTSTATE_STATUS_CONCAT_IMPL_(a, b) a##b

namespace optstate {

// Returns `status` with `context` and ": " before its message.
inline absl::Status Annotate(const absl::Status& status,
                             absl::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(context, ": ", status.message()));
}

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_STATUS_MACROS_H_
