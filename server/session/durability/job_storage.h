#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_JOB_STORAGE_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_JOB_STORAGE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/config.pb.h"
#include "optstate/v1/types.pb.h"
#include "proto/types/layout.h"
#include "storage/io/io_engine.h"
#include "storage/swap_sizes.h"

namespace optstate::session {

// Returns INVALID_ARGUMENT when settings contradict each other, and
// FAILED_PRECONDITION, with what to set, when the node has no disk for them.
absl::Status CheckStorage(const v1::StorageSettings& storage,
                          const v1::DaemonConfig& config);

// Returns the settings of a new job, with the node's defaults in place of what
// is not set, and without what only the daemon sets. Placement is HOST or NVME;
// PLACEMENT_AUTO is decided before (tiers/auto_placement.h).
v1::StorageSettings ResolveStorage(const v1::StorageSettings& asked,
                                   const v1::DaemonConfig& config);

// Returns the least host budget of a job with PLACEMENT_NVME.
uint64_t LeastBudget(const storage::SwapSizes& sizes);
// Returns INVALID_ARGUMENT, with the least, when a budget is less.
absl::Status CheckBudgetHolds(uint64_t bytes, const storage::SwapSizes& sizes);

// Returns FAILED_PRECONDITION, naming it, when a setting that is set differs
// from the job's, and from what the job was made with.
absl::Status CheckSameStorage(const v1::StorageSettings& now,
                              const v1::StorageSettings& asked);

// Returns the fraction of elements that the CPU is to update.
double OffloadFractionOf(const v1::StorageSettings& storage);
// Returns the bytes of each device for records that stay there; 0: none stay.
uint64_t DeviceBudgetOf(const v1::StorageSettings& storage);
bool IsDurable(const v1::StorageSettings& storage);
// Says whether records have files on disk: those of PLACEMENT_NVME are read
// from there too, those of a durable job in host memory are all in frames.
bool UsesDisk(const v1::StorageSettings& storage);

// Returns the settings of a job once an operator has changed what the request
// sets. INVALID_ARGUMENT: a value is wrong, with the least that may be;
// FAILED_PRECONDITION: such a job has no such setting, and what to do.
absl::StatusOr<v1::StorageSettings> ChangeStorage(
    const v1::StorageSettings& now, const v1::SetJobRequest& request,
    const storage::SwapSizes& sizes);

// Returns the bytes of the job's frames: with PLACEMENT_NVME what the host
// budget has room for, else all records; whole frames, at least
// kSwapFramesMin.
uint64_t FrameBytesOf(const v1::StorageSettings& storage,
                      const storage::SwapSizes& sizes);

// The memory for parameters that are on disk where the job does not say.
inline constexpr uint64_t kParameterCacheBytesDefault = uint64_t{64} << 20;
// Returns the bytes of the job's memory for parameters that are on disk; 0:
// they are in memory. INVALID_ARGUMENT: the settings ask for too little, with
// the least.
absl::StatusOr<uint64_t> ParameterCacheBytesOf(
    const v1::StorageSettings& storage, const storage::SwapSizes& sizes);

// Returns the job's directories on disk, below those of the configuration.
std::vector<std::string> DiskDirectoriesOf(const v1::DaemonConfig& config,
                                           const std::string& job);
// Returns how many of them the job has, from the first on.
uint32_t DirectoryCountOf(const v1::DaemonConfig& config,
                          const v1::StorageSettings& storage);
// Returns those that it has. FAILED_PRECONDITION: this daemon has none, or
// fewer.
absl::StatusOr<std::vector<std::string>> OwnDirectoriesOf(
    const v1::DaemonConfig& config, const std::string& job,
    const v1::StorageSettings& storage);
// Returns the devices of the configuration's directories, by directory; empty:
// it has none.
std::vector<std::string> DevicesOf(const v1::NvmeSettings& nvme);
// Notes in each that the job is durable.
absl::Status MarkDurable(const std::vector<std::string>& directories);
// Returns NOT_FOUND when the first directory has no commits: the job is not
// there. FAILED_PRECONDITION when another directory says that it is durable:
// the first one's disk is not mounted, and the job must not be made anew.
absl::Status CheckHasCommits(const std::vector<std::string>& directories);

// Makes the engine that the configuration asks for; logs what it does without.
// The engine adds the bytes that it reads and writes to `*done_bytes`, unless
// null.
absl::StatusOr<std::unique_ptr<io::IoEngine>> MakeDiskEngine(
    const v1::DaemonConfig& config, std::atomic<uint64_t>* done_bytes);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_JOB_STORAGE_H_
