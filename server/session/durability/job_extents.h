#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_JOB_EXTENTS_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_JOB_EXTENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "optstate/v1/config.pb.h"
#include "storage/arrangement.h"

namespace optstate::session {

// Returns, by directory, where the records of the job lie on a device in this
// arrangement. `bytes`: those of its records in each directory of the
// configuration that it has, from the first on; it has claimed its folders. A
// new arrangement gets an extent of `bytes` in each directory with a device.
// One that exists keeps what its folders say, so that a job made before its
// directory had a device goes on with files.
// FAILED_PRECONDITION: a device cannot be used, or is not the one that has the
// job's extent (storage/block_device/device.h); RESOURCE_EXHAUSTED: a new job
// has no room on one; DATA_LOSS: a device or an extent is damaged.
absl::StatusOr<std::vector<storage::DeviceExtent>> TakeExtents(
    const v1::NvmeSettings& nvme, const std::string& job,
    absl::Span<const uint64_t> bytes, uint32_t arrangement, bool is_new);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_JOB_EXTENTS_H_
