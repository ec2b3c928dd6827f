#ifndef OPTSTATE_TESTS_LOAD_LOAD_DAEMON_H_
#define OPTSTATE_TESTS_LOAD_LOAD_DAEMON_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/load/process_costs.h"

namespace optstate::load {

// A daemon under load, and the operator who keeps one connection to it all the
// time.
//
// Threads: one at a time.
class LoadDaemon {
 public:
  // `config` is a configuration file's text.
  static absl::StatusOr<std::unique_ptr<LoadDaemon>> Start(std::string config);

  const TestDaemon& daemon() const { return *daemon_; }
  pid_t pid() const { return daemon_->process().pid(); }

  absl::StatusOr<v1::ListJobsReply> ListJobs() const;
  // Deletes all jobs, or those of one user; none may have a rank unless
  // `force`. A job that ends by itself meanwhile is no error.
  absl::Status DeleteJobs(bool force) const;
  absl::Status DeleteJobsOf(uid_t uid) const;

  // Numbers of open fds.
  struct Fds {
    size_t supervisor = 0;
    size_t ranks = 0;  // of this process

    bool operator==(const Fds& other) const = default;
  };
  Fds CountFds() const;
  // Returns the numbers once there is no engine and they have stayed as they
  // are over many calls to the daemon: fds of what has just ended are gone
  // then.
  absl::StatusOr<Fds> SettledFds() const;
  // Waits until there is no engine, and the fds are these again.
  absl::Status AwaitFds(const Fds& expected) const;

 private:
  explicit LoadDaemon(std::unique_ptr<TestDaemon> daemon);
  absl::Status DeleteJob(const std::string& name, bool force) const;

  const std::unique_ptr<TestDaemon> daemon_;
  const std::unique_ptr<v1::Admin::Stub> operator_;
};

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_LOAD_DAEMON_H_
