#ifndef OPTSTATE_CLIENT_CTL_EXIT_CODE_H_
#define OPTSTATE_CLIENT_CTL_EXIT_CODE_H_

#include "absl/status/status.h"

namespace optstate::ctl {

// The exit codes of optctl; scripts depend on them (README of this folder).
inline constexpr int kExitOk = 0;
inline constexpr int kExitOther = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNotFound = 3;
inline constexpr int kExitRefused = 4;
inline constexpr int kExitUnreachable = 5;
inline constexpr int kExitDamaged = 6;
inline constexpr int kExitCancelled = 7;
inline constexpr int kExitOlderDaemon = 8;

inline int ExitCode(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
      return kExitUsage;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kAlreadyExists:
      return kExitRefused;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return kExitUnreachable;
    case absl::StatusCode::kDataLoss:
      return kExitDamaged;
    case absl::StatusCode::kCancelled:
      return kExitCancelled;
    case absl::StatusCode::kUnimplemented:
      return kExitOlderDaemon;
    default:
      return kExitOther;
  }
}

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_EXIT_CODE_H_
