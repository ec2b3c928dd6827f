#ifndef OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_FIXTURE_H_
#define OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_FIXTURE_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "server/supervisor/supervisor_harness.h"

namespace optstate::supervisor {

// A supervisor with fake engines, and the sessions of its clients.
class SupervisorTest : public testing::Test {
 protected:
  // Opens a session, or fails the test.
  TestSession MustOpen(const std::string& job) {
    auto session = harness_.Open(job);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : TestSession();
  }

  bool Exists(const std::string& path) {
    return ::access(path.c_str(), F_OK) == 0;
  }

  SupervisorHarness harness_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SUPERVISOR_FIXTURE_H_
