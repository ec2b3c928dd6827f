#ifndef OPTSTATE_STORAGE_DISK_FOLDER_H_
#define OPTSTATE_STORAGE_DISK_FOLDER_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/io/io_engine.h"

namespace optstate::storage {

// A job's folder on a disk, DIR/jobs/NAME, and its small files, which say whose
// it is. Their bytes: format/FORMAT.md. A job of a build before these files has
// neither `identity` nor `memory`.
inline constexpr char kDiskOwnerFile[] = "/owner";
inline constexpr char kDiskCommitsFile[] = "/commits";
inline constexpr char kDiskRecordsFile[] = "/records";
inline constexpr char kDiskDurableFile[] = "/durable";
inline constexpr char kDiskIdentityFile[] = "/identity";
inline constexpr char kDiskMemoryFile[] = "/memory";
// Holds where the rest of the job's state is while the job is asleep.
inline constexpr char kDiskAsleepFile[] = "/asleep";
// In place of `records`, where they lie on a device.
inline constexpr char kDiskExtentFile[] = "/extent";
// The names of these two in arrangements with an odd number (FORMAT.md).
inline constexpr char kDiskOddRecordsFile[] = "/records.1";
inline constexpr char kDiskOddExtentFile[] = "/extent.1";

inline constexpr char kDiskJobsFolder[] = "/jobs";

// Returns the folder of a job in one of the daemon's directories.
std::string DiskFolder(absl::string_view directory, absl::string_view job);

// Returns whether the path exists. One that exists and cannot be inspected, as
// on a disk with errors, does not count as gone.
bool MayExist(const std::string& path);

// Returns whether the folder belongs to a durable job: it may be all that is
// left of the job after a power cut.
bool IsDurableFolder(const std::string& folder);

// Returns whether the folder has records, in a file or on a device.
bool HasRecords(const std::string& folder);

// Returns the owner's uid; nullopt: there is no such file. DATA_LOSS: it holds
// no uid.
absl::StatusOr<std::optional<uint32_t>> ReadDiskOwner(
    const std::string& folder);

// The part of a job that a folder has.
struct DiskIdentity {
  uint64_t incarnation = 0;
  uint32_t index = 0;  // the folder's place among the job's, from 0
  uint32_t count = 0;  // of the job's folders

  bool operator==(const DiskIdentity&) const = default;
};

// Nullopt: there is no such file. DATA_LOSS: its content is not what was
// written.
absl::StatusOr<std::optional<DiskIdentity>> ReadDiskIdentity(
    const std::string& folder);
absl::Status WriteDiskIdentity(const std::string& folder,
                               const DiskIdentity& identity);

// The part of a device on which a folder's records lie.
struct DiskExtent {
  std::string device_id;  // that of the device's superblock
  io::Extent extent;

  bool operator==(const DiskExtent&) const = default;
};

// Returns the path of the file that says so, of an arrangement.
std::string DiskExtentPath(const std::string& folder, uint32_t arrangement = 0);
// Nullopt: there is no such file. DATA_LOSS: its content is not what was
// written.
absl::StatusOr<std::optional<DiskExtent>> ReadDiskExtent(
    const std::string& folder, uint32_t arrangement = 0);
absl::Status WriteDiskExtent(const std::string& folder,
                             const DiskExtent& extent,
                             uint32_t arrangement = 0);
// Removes that file, durably, if it is there.
absl::Status RemoveDiskExtent(const std::string& folder, uint32_t arrangement);

// Notes where the rest of the job's state is: in `job_directory`, in memory of
// the machine as it runs now.
absl::Status WriteDiskMemory(const std::string& folder,
                             absl::string_view job_directory);
// Returns whether the rest of the state of the folder's job may be somewhere,
// or an engine has the folder's records: then the folder must not be given up.
// `except`: a job directory that is known to have no state, or empty; `device`:
// that of the folder's directory, without which an extent counts as used. Of a
// folder without `memory` only the engine is looked for.
bool IsDiskFolderInUse(const std::string& folder, absl::string_view except = "",
                       const std::string& device = "");

// Returns the id of the machine's present start, another one after a reboot,
// with a line's end.
absl::StatusOr<std::string> ReadBootId();

// Reads a small text. NOT_FOUND: there is no such file.
absl::StatusOr<std::string> ReadDiskText(const std::string& path);

// Writes a small file so that a loss of power leaves the former one or this
// one, whole.
absl::Status WriteDurably(const std::string& path, absl::string_view text);
// Makes the names in a folder durable.
absl::Status SyncFolder(const std::string& path);
// Makes a folder, durably, unless it is there.
absl::Status MakeFolder(const std::string& path);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_DISK_FOLDER_H_
