#ifndef OPTSTATE_STORAGE_IO_DISK_BANDWIDTH_H_
#define OPTSTATE_STORAGE_IO_DISK_BANDWIDTH_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "storage/io/io_engine.h"

namespace optstate::io {

// The bytes that a directory's disk moves in a second.
struct DiskBandwidth {
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  // Reads and writes in turn, as in a step over records on disk, together.
  double mixed_bytes_per_s = 0;
};

struct DiskBandwidthOptions {
  // The bytes of a request: those of a record, as a rule.
  uint64_t request_bytes = uint64_t{3} << 20;
  uint32_t requests = 8;  // under way at once
  uint64_t file_bytes_max = uint64_t{256} << 20;
  // The time of each phase: filling the file, writing, reading, both. What is
  // under way then is waited for.
  absl::Duration phase_time = absl::Milliseconds(500);
};

// Measures with requests as a job makes them, over a file that is made for it.
// The file has no name as soon as it is open, so that its blocks are free again
// whatever ends the process. It takes at most an eighth of what the file system
// has left.
//
// NOT_FOUND: there is no such directory. RESOURCE_EXHAUSTED: there is too
// little room, with the bytes needed and left. Other errors are those of the
// engine, which the caller gives no other work meanwhile.
//
// A file system that has no O_DIRECT, and a disk behind a cache, look as fast
// as that cache.
absl::StatusOr<DiskBandwidth> MeasureDiskBandwidth(
    IoEngine* engine, const std::string& directory,
    const DiskBandwidthOptions& options = {});

// Measures as above over a part of a device, of which it overwrites what it
// needs: whole rounds of requests, file_bytes_max at the most. Errors are those
// of the engine, and INVALID_ARGUMENT for a part below
// DeviceBandwidthBytesMin().
absl::StatusOr<DiskBandwidth> MeasureDeviceBandwidth(
    IoEngine* engine, const std::string& device, const Extent& part,
    const DiskBandwidthOptions& options = {});

// Returns the bytes that the part of a device must have.
uint64_t DeviceBandwidthBytesMin(const DiskBandwidthOptions& options);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_DISK_BANDWIDTH_H_
