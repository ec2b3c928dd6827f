#ifndef OPTSTATE_SERVER_SUPERVISOR_CORE_SHARES_H_
#define OPTSTATE_SERVER_SUPERVISOR_CORE_SHARES_H_

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"
#include "server/os/cpu_group.h"

namespace optstate::supervisor {

// Has the kernel divide the cores between engines by the weights of their jobs.
//
// Uses cgroup v2 when the daemon's own group is delegated to it: each engine
// gets a group below that with the weight as its cpu.weight (os/cpu_group.h).
// Otherwise uses nice values, as far as the process may set them.
//
// Threads: not thread-safe.
class CoreShares {
 public:
  // Determines what this process may do. `root`: "" or the directory of a
  // test's files.
  static CoreShares Find(const v1::EngineSettings& settings,
                         const std::string& root = "");

  // Names the means in use, and why a better one is not.
  const std::string& description() const { return description_; }

  // Gives all threads of the engine, also later ones, its share.
  absl::Status Apply(const std::string& job, pid_t pid) const;
  // Removes the share of an engine that has ended.
  void Forget(const std::string& job) const;

  // The nice value for the job's weight; for Apply without cgroups.
  int NiceOf(const std::string& job) const;

 private:
  explicit CoreShares(const v1::EngineSettings& settings)
      : settings_(settings) {}
  void UseNice();

  v1::EngineSettings settings_;
  std::optional<os::CpuGroup> group_;  // none: by nice values
  int nice_of_100_ = 0;                // of a job of weight 100
  std::string description_;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_CORE_SHARES_H_
