#ifndef OPTSTATE_STORAGE_NEXT_FRAME_TABLE_H_
#define OPTSTATE_STORAGE_NEXT_FRAME_TABLE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/state_file.h"

// The frame table of an arrangement of records to come. It lies beside the
// job's `frame_table` as `frame_table.N`, N being the number of the
// arrangement, until the job's description has this number. From then on it is
// the job's, and takes the other name.
namespace optstate::storage {

// Makes the table, of zeros, in place of any that is there. RESOURCE_EXHAUSTED:
// the file system cannot hold it; nothing is left.
absl::StatusOr<StateFile> MakeNextFrameTable(const std::string& state_folder,
                                             uint32_t arrangement,
                                             uint64_t bytes);
// Removes it, if it is there.
void RemoveNextFrameTable(const std::string& state_folder,
                          uint32_t arrangement);
// Has the table of this arrangement, that of the job's description, be the
// job's under its name, and removes one of the next arrangement, which did not
// come about.
absl::Status SettleFrameTable(const std::string& state_folder,
                              uint32_t arrangement);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_NEXT_FRAME_TABLE_H_
