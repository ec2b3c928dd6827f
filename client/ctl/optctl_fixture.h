#ifndef OPTSTATE_CLIENT_CTL_OPTCTL_FIXTURE_H_
#define OPTSTATE_CLIENT_CTL_OPTCTL_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::ctl {

// A command that has ended.
struct Ran {
  int exit_code = -1;
  std::string output;  // stdout and stderr
};

// Runs a shell's command line.
Ran RunCommand(const std::string& command);
// Runs optctl with these arguments alone.
Ran RunBinary(const std::string& arguments,
              const std::string& redirections = "2>&1");

// optctl as a user runs it: the real binary against a real daemon.
class OptctlTest : public testing::Test {
 protected:
  void SetUp() override;

  // Trains a job of two parameters for one step; the session stays open.
  std::unique_ptr<client::Session> Train(
      const std::string& job, const client::StorageOptions& storage = {});
  static absl::StatusOr<client::Outcome> Step(client::Session& session,
                                              uint64_t step);

  std::string AtDaemon(const std::string& arguments) const;
  Ran Optctl(const std::string& arguments) const;
  // Runs optctl with a stdout that accepts no output.
  Ran OptctlToFull(const std::string& arguments) const;

  // Stops the engine; returns when none of its threads runs.
  Process StopEngine(const std::string& job) const;
  // Returns the pid of a running engine, other than `last`, that calls its job
  // FAILED.
  int64_t AwaitFailedEngine(const std::string& name, int64_t last);

  std::unique_ptr<TestDaemon> daemon_;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_OPTCTL_FIXTURE_H_
