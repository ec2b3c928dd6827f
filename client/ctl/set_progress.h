#ifndef OPTSTATE_CLIENT_CTL_SET_PROGRESS_H_
#define OPTSTATE_CLIENT_CTL_SET_PROGRESS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// Finds how far a change of a job's settings is, from one look to the next:
// records that are written before a step is durable or memory is given up, and
// memory that is reserved for more of them.
//
// Threads: not thread-safe.
class SetProgress {
 public:
  explicit SetProgress(const v1::SetJobRequest& request)
      : job_(request.name()), host_budget_(request.host_budget_bytes()) {}

  // Whether the memory of the job tells something.
  bool needs_memory() const { return host_budget_ != 0; }

  // Returns the progress. `memory_bytes`: of the job's files in memory; 0: not
  // known. `left`: until optctl gives up.
  std::string Look(const v1::Job& job, uint64_t memory_bytes, absl::Time now,
                   absl::Duration left);
  // Returns what is known without a look.
  std::string Waiting(absl::Duration left) const;

 private:
  // A look at the beginning of something that comes on.
  struct Begin {
    absl::Time at;
    uint64_t records = 0;        // to be written
    uint64_t bytes_written = 0;  // by then
    uint64_t memory_bytes = 0;   // taken by then
    uint64_t frame_bytes = 0;    // of all frames, by then
  };

  std::string Writes(const v1::DiskState& disk, absl::Time now);
  std::string Reserves(const v1::DiskState& disk, uint64_t memory_bytes,
                       absl::Time now);

  const std::string job_;
  const uint64_t host_budget_;
  std::optional<Begin> writing_;
  std::optional<Begin> reserving_;
};

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_SET_PROGRESS_H_
