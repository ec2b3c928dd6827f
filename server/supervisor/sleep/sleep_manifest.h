#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEP_MANIFEST_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEP_MANIFEST_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/sleep.pb.h"

namespace optstate::supervisor {

inline constexpr uint32_t kSleepFormat = 1;
// The manifest, in a sleeping job's folder, and the folder of its files.
inline constexpr char kManifestFile[] = "/manifest";
inline constexpr char kFilesFolder[] = "/files";

// Writes the manifest of a sleeping job's folder, durably.
absl::Status WriteManifest(const std::string& folder,
                           const v1::SleepManifest& manifest);

// Reads it. NOT_FOUND: there is none, as when its disk is not mounted;
// DATA_LOSS: it is damaged; FAILED_PRECONDITION: another build wrote it.
absl::StatusOr<v1::SleepManifest> ReadManifest(const std::string& folder);

// The bytes of a sleeping job: those with data, which the disk holds, and those
// that its files take in memory.
uint64_t DiskBytes(const v1::SleepManifest& manifest);
uint64_t MemoryBytes(const v1::SleepManifest& manifest);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_SLEEP_MANIFEST_H_
