#ifndef OPTSTATE_SERVER_SUPERVISOR_CORE_SHARES_H_
#define OPTSTATE_SERVER_SUPERVISOR_CORE_SHARES_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"
#include "server/os/cpu_group.h"

namespace optstate::supervisor {

// The weights of users.
struct UserWeights {
  // Returns that of one; null: all are alike.
  std::function<uint32_t(uid_t)> of = nullptr;
  uint32_t largest = 100;
};

// Has the kernel divide the cores between users by their weights, and each
// user's part between the engines of its jobs by theirs. So a user with many
// jobs has no more of the cores than one with a single job.
//
// Uses cgroup v2 when the daemon's own group is delegated to it: each user gets
// a group below that, and each engine one below its user's, with the weight as
// its cpu.weight (os/cpu_group.h). Otherwise uses nice values, as far as the
// process may set them: these are computed from both levels of weights, and
// change whenever an engine begins or ends. A process that may not raise
// priorities cannot follow that: then a job's value depends on its own weight
// and its user's alone.
//
// Threads: not thread-safe.
class CoreShares {
 public:
  // Determines what this process may do. `root`: "" or the directory of a
  // test's files.
  static CoreShares Find(const v1::EngineSettings& settings,
                         UserWeights users = {}, const std::string& root = "");

  // Names the means in use, and why a better one is not.
  const std::string& description() const { return description_; }

  // Gives all threads of the engine, also later ones, its share, and engines
  // that run already theirs beside it.
  absl::Status Apply(const std::string& job, uid_t owner, pid_t pid);
  // Removes the share of an engine that has ended; the others divide it.
  absl::Status Forget(const std::string& job);

  // Returns the nice value of the job's engine; for Apply without cgroups. The
  // job has been given to Apply(), or the value is that of it alone.
  int NiceOf(const std::string& job, uid_t owner = 0) const;

 private:
  // An engine that runs.
  struct Engine {
    uid_t owner = 0;
    pid_t pid = 0;
    std::optional<int> nice = std::nullopt;  // that it has
  };

  CoreShares(const v1::EngineSettings& settings, UserWeights users);
  void UseNice();
  uint32_t WeightOf(uid_t user) const;
  // Returns the nice values that the engines should have.
  std::map<std::string, int> NiceValues() const;
  int NiceOfWeight(double weight) const;
  // Sets the nice values that have changed.
  absl::Status Renice();

  v1::EngineSettings settings_;
  UserWeights users_;
  std::optional<os::CpuGroup> group_;  // none: by nice values
  int nice_of_100_ = 0;                // of a job of weight 100
  bool may_raise_ = false;             // nice values can follow the engines
  std::string description_;
  std::map<std::string, Engine> engines_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_CORE_SHARES_H_
