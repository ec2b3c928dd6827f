#ifndef OPTSTATE_SERVER_SESSION_TIERS_DISK_RATES_H_
#define OPTSTATE_SERVER_SESSION_TIERS_DISK_RATES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/rates.pb.h"
#include "storage/io/disk_bandwidth.h"

namespace optstate::session {

// The bandwidth of the daemon's directories on disks. Each is measured once
// while the machine runs, by the engine that first needs it, and recorded in
// STATE_DIR/disk_rates for all others.

// The rates of the directories, in the daemon's order.
struct DiskRates {
  // Without `measured_at_ns`: not known.
  std::vector<v1::DirectoryRates> directories;
  // Why a directory could not be measured; else OK. None: nothing was measured.
  std::vector<absl::Status> problems;
};

// Returns what is recorded of this boot and these file systems. A record that
// cannot be read counts as none, with a warning in the log.
DiskRates RecordedDiskRates(const std::string& state_dir,
                            const v1::NvmeSettings& nvme);

// Measures one directory; the fields of bandwidth and of the I/O engine.
using MeasureDirectory = std::function<absl::StatusOr<v1::DirectoryRates>(
    const std::string& directory)>;

// Measures directories of which nothing is recorded, or all `anew`, and records
// what was measured, one directory after the other. Takes up to 3 s a
// directory; processes that measure take turns. A directory that cannot be
// measured is one that is not known: the log and the result say why.
DiskRates MeasureDiskRates(const std::string& state_dir,
                           const v1::DaemonConfig& config, bool anew);
// As above, with another way to measure, for tests.
DiskRates MeasureDiskRates(const std::string& state_dir,
                           const v1::NvmeSettings& nvme, bool anew,
                           const MeasureDirectory& measure);

// Returns the weights by which the records of a new job are split over the
// directories: those of the configuration, else by rates, when all are known;
// none: equal parts.
std::vector<uint32_t> DirectoryWeights(const v1::NvmeSettings& settings,
                                       const DiskRates& rates);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TIERS_DISK_RATES_H_
