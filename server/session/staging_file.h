#ifndef OPTSTATE_SERVER_SESSION_STAGING_FILE_H_
#define OPTSTATE_SERVER_SESSION_STAGING_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/shm/sealed_segment.h"
#include "server/session/gradient_keeper.h"
#include "storage/state_file.h"

namespace optstate {

// Gradients that did not arrive in a segment of the rank's own lie in a file of
// the job's directory, so that they outlive the engine:
// DIRECTORY/gradients.RANK.INSTANCE, gradient_area_bytes long, at least 1.
std::string StagingFilePath(absl::string_view job_directory, uint32_t rank,
                            uint64_t client_instance);
bool IsStagingFile(absl::string_view name);

// Mapped; what is in it stays. DATA_LOSS when there is none of that size.
absl::StatusOr<StateFile> OpenStagingFile(const std::string& path,
                                          uint64_t gradient_area_bytes);
// Opens it, or makes one of zeros; `present` says which. RESOURCE_EXHAUSTED
// when there is no memory; then none is left behind.
absl::StatusOr<StateFile> MakeStagingFile(const std::string& path,
                                          uint64_t gradient_area_bytes,
                                          bool* present);

// Checks seals and size: `gradient_area_bytes` from the offset on must be
// there.
absl::StatusOr<shm::PeerSegment> MapKeptGradients(KeptGradients kept,
                                                  uint64_t gradient_area_bytes);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_STAGING_FILE_H_
