#ifndef OPTSTATE_SERVER_SESSION_RECOVERY_STAGING_FILE_H_
#define OPTSTATE_SERVER_SESSION_RECOVERY_STAGING_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/shm/sealed_segment.h"
#include "server/session/recovery/gradient_keeper.h"
#include "storage/state_file.h"

namespace optstate::session {

// Returns the path of the file in the job's directory with the gradients that
// did not arrive in a segment of the rank's own; a file outlives the engine.
// The path is DIRECTORY/gradients.RANK.INSTANCE, the size gradient_area_bytes,
// at least 1.
std::string StagingFilePath(absl::string_view job_directory, uint32_t rank,
                            uint64_t client_instance);
bool IsStagingFile(absl::string_view name);

// Opens and maps the file; its content stays. DATA_LOSS when there is none of
// that size.
absl::StatusOr<storage::StateFile> OpenStagingFile(
    const std::string& path, uint64_t gradient_area_bytes);
// Opens the file, or makes one of zeros; `present` says which.
// RESOURCE_EXHAUSTED when there is no memory; then no file is left behind.
absl::StatusOr<storage::StateFile> MakeStagingFile(const std::string& path,
                                                   uint64_t gradient_area_bytes,
                                                   bool* present);

// Maps the segment after checking seals and size: `gradient_area_bytes` must
// exist from the offset on, and the first `needed_bytes` of them be without
// holes. Only these may be read: pages behind them may not have followed yet
// when the rank's engine died.
absl::StatusOr<shm::PeerSegment> MapKeptGradients(KeptGradients kept,
                                                  uint64_t gradient_area_bytes,
                                                  uint64_t needed_bytes);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RECOVERY_STAGING_FILE_H_
