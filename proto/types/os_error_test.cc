#include "proto/types/os_error.h"

#include <cerrno>

#include "gtest/gtest.h"

namespace optstate {
namespace {

TEST(OsErrorTest, CodesSayWhatTheCallerCanDo) {
  const auto code = [](int error_number) {
    return OsError(error_number, "call").code();
  };
  EXPECT_EQ(code(ENOENT), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(EACCES), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(code(EPERM), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(code(EEXIST), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(code(EINVAL), absl::StatusCode::kInvalidArgument);
  for (int full : {ENOSPC, ENOMEM, EMFILE, ENFILE, EDQUOT}) {
    EXPECT_EQ(code(full), absl::StatusCode::kResourceExhausted) << full;
  }
  for (int gone : {ECONNREFUSED, ECONNRESET, ECONNABORTED, EPIPE, ESHUTDOWN}) {
    EXPECT_EQ(code(gone), absl::StatusCode::kUnavailable) << gone;
  }
}

TEST(OsErrorTest, MessageNamesCallTextAndNumber) {
  EXPECT_EQ(OsError(ENOENT, "open /a").message(),
            "open /a: No such file or directory [errno 2]");
}

TEST(OsErrorTest, UnknownNumbersAreErrorsToo) {
  EXPECT_EQ(OsError(12345, "call").code(), absl::StatusCode::kUnknown);
}

}  // namespace
}  // namespace optstate
