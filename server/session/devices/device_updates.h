#ifndef OPTSTATE_SERVER_SESSION_DEVICES_DEVICE_UPDATES_H_
#define OPTSTATE_SERVER_SESSION_DEVICES_DEVICE_UPDATES_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "optstate/v1/admin.pb.h"
#include "server/session/job_context.h"
#include "server/session/job_description.h"
#include "server/session/job_types.h"

// The job's side of updates that are shared with devices. Bits do not depend on
// what is shared, so a job whose devices cannot be had any more goes on by the
// CPU, and says so; only a job that asks for devices is refused.
//
// Threads: not thread-safe; the job's lock guards the job.
namespace optstate::session {

// Opens the daemon's devices if such a job uses some. FAILED_PRECONDITION:
// there are none, or one fails, and what to do; UNIMPLEMENTED: no device has a
// kernel of the optimizer; RESOURCE_EXHAUSTED: no memory. Never UNAVAILABLE,
// after which a client would ask again.
absl::Status CheckDeviceUpdates(const JobDescription& description,
                                JobContext* job);

// Returns the bytes of host memory that such a job takes for copies to and from
// devices. Devices that are not open take none.
uint64_t DeviceUpdateBytes(const JobContext& job,
                           const JobDescription& description);

// Makes the executor of the present shape and files, before its scheduler.
void MakeExecutor(JobContext* job);

// Shares updates as the settings say from the next pass on. An error, which is
// logged and kept for DescribeDeviceUpdates, is as above, and leaves the shares
// as they were, but that no record stays on a device.
absl::Status ShareUpdates(const v1::StorageSettings& storage, JobContext* job);

// Brings the records that stay on devices up to date in the store: it has the
// only ones until the next pass. Gives up the job's lock while records are read
// from a disk. Errors are those of the store; the other records are up to date.
absl::Status SettleRecords(JobContext* job);

// Has no record stay on a device, and nothing of the job's files be in use
// there, before the files change or go. ShareUpdates() lets them stay again.
// After an error, which is that of SettleRecords(), the gradient log has what
// records lack, for the next scheduler over these files.
absl::Status ReleaseDevices(JobContext* job);

// Returns an error when the job has no layout, has failed, or finishes the step
// of a former engine: then nothing is shared with ranks.
absl::Status CheckMayShare(const JobContext& job);

// See Job. Between two passes.
absl::StatusOr<DeviceParameters> ShareParameters(absl::string_view device,
                                                 JobContext* job);

// The rank, its gradient area, and the device that it is on.
struct RankOnDevice {
  uint32_t rank = 0;
  const std::byte* area = nullptr;
  absl::string_view device;
};

// See Job. Between two passes.
absl::Status ShareGradients(const RankOnDevice& rank, DeviceGradients gradients,
                            JobContext* job);

// Fills in what operators see; leaves it alone when the CPU is to update all.
void DescribeDeviceUpdates(const JobContext& job, v1::Job* description);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DEVICES_DEVICE_UPDATES_H_
