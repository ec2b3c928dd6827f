#ifndef OPTSTATE_SERVER_SESSION_TESTING_SCOPED_FILE_LIMIT_H_
#define OPTSTATE_SERVER_SESSION_TESTING_SCOPED_FILE_LIMIT_H_

#include <signal.h>
#include <sys/resource.h>

#include "gtest/gtest.h"

namespace optstate::session {

// Limits, while it lives, the size to which this process can make files grow:
// allocations and writes beyond it fail.
class ScopedFileLimit {
 public:
  explicit ScopedFileLimit(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit limit = {bytes, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~ScopedFileLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  ScopedFileLimit(const ScopedFileLimit&) = delete;
  ScopedFileLimit& operator=(const ScopedFileLimit&) = delete;

 private:
  rlimit before_ = {};
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_SCOPED_FILE_LIMIT_H_
