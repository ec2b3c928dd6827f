#ifndef OPTSTATE_TESTS_LOAD_JOB_FLEET_H_
#define OPTSTATE_TESTS_LOAD_JOB_FLEET_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "tests/load/first_error.h"
#include "tests/load/stretch.h"

namespace optstate::load {

// Many small jobs of this process in one daemon, each with some ranks.
//
// A job's ranks are on one thread: it pushes and commits for each of them, then
// waits for each. So a job's step takes as long as with ranks that do not wait
// for one another but in the commit.
//
// Threads: one at a time; it makes its own.
class JobFleet {
 public:
  struct Options {
    std::string endpoint;
    std::string prefix;     // of the jobs' names
    uint32_t jobs = 1;      // at least 1
    uint32_t sessions = 1;  // of all jobs together; at least `jobs`
    int64_t elements = 0;   // of a job, about
    // From the begin of a job's step to that of its next; zero: no pause.
    absl::Duration step_interval = absl::ZeroDuration();
  };

  // INVALID_ARGUMENT: so many sessions cannot be spread over so many jobs.
  static absl::Status CheckSpread(uint32_t jobs, uint32_t sessions);

  // Makes the jobs, attaches their ranks and loads them.
  static absl::StatusOr<std::unique_ptr<JobFleet>> Open(Options options);

  // Has every job take steps, `stretch` of them each, on a thread of its own;
  // returns how long each step took, in ms. After an error of one job all of
  // them end their stretch.
  absl::StatusOr<std::vector<double>> Step(const Stretch& stretch);

  // Returns the options of one rank more of a job.
  client::SessionOptions RankOptions(size_t job, uint32_t rank) const;
  size_t size() const { return jobs_.size(); }
  std::vector<std::string> names() const;
  // The last step that the job took, as its ranks were answered.
  uint64_t steps(size_t job) const { return jobs_[job].steps; }
  // Checks that every rank of every job is at the job's last step.
  absl::Status CheckRanks() const;

 private:
  struct Job {
    std::string name;
    uint32_t world_size = 1;
    std::vector<std::unique_ptr<client::Session>> ranks;
    uint64_t steps = 0;
  };

  explicit JobFleet(Options options);

  absl::Status OpenAll();
  absl::Status OpenJob(size_t index);
  absl::Status StepJob(Job* job) const;
  absl::Status StepStretch(Job* job, const Stretch& stretch,
                           const FirstError* error,
                           std::vector<double>* times_ms) const;

  const Options options_;
  std::vector<Job> jobs_;
};

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_JOB_FLEET_H_
