#ifndef OPTSTATE_SERVER_SESSION_DEVICES_RESIDENT_SIZES_H_
#define OPTSTATE_SERVER_SESSION_DEVICES_RESIDENT_SIZES_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "server/scheduler/gradient_log.h"
#include "server/session/job_description.h"

namespace optstate::session {

// The sizes of the records of a job that stay on devices.
struct ResidentSizes {
  uint64_t device_bytes = 0;      // of each device; 0: none stay
  uint64_t batch_bytes = 0;       // of the parameters in a batch of tiles
  uint64_t batch_host_bytes = 0;  // of the host memory of a batch
  // The parameters of the records of each device, for ranks that copy them; 0:
  // ranks get none there.
  uint64_t parameter_bytes = 0;
  scheduler::GradientLog::Room log;  // of no tile: no record lags behind
  scheduler::GradientLog::Content log_content =
      scheduler::GradientLog::Content::kGradient;
};

// Returns the sizes for the share of so many devices, as far as the job's
// device_budget goes.
ResidentSizes ResidentSizesOf(const JobDescription& description,
                              size_t devices);
// Returns the bytes of the job's gradient_log; 0: it has none.
uint64_t GradientLogBytes(const JobDescription& description, size_t devices);

// Returns, for a job with a device_budget, why none of its records can stay on
// a device. FAILED_PRECONDITION: it speculates.
absl::Status CheckResidents(const JobDescription& description);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DEVICES_RESIDENT_SIZES_H_
