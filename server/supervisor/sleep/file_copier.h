#ifndef OPTSTATE_SERVER_SUPERVISOR_SLEEP_FILE_COPIER_H_
#define OPTSTATE_SERVER_SUPERVISOR_SLEEP_FILE_COPIER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/sleep.pb.h"
#include "proto/types/unique_fd.h"
#include "server/supervisor/sleep/copy_control.h"

namespace optstate::supervisor {

// Describes a file that no process writes: size, mode, allocated bytes and the
// parts with data; neither path nor checksum.
absl::StatusOr<v1::SleepFile> DescribeFile(const std::string& path);
// Returns the bytes of all parts with data.
uint64_t DataBytes(const v1::SleepFile& file);

// Copies the parts with data of `from` into a new file on a disk, and syncs it.
// The pages of the copy do not stay in memory. Sets `file->crc32c`. The data of
// `from` must stay as it was described. RESOURCE_EXHAUSTED: the disk is full.
absl::Status CopyToDisk(const std::string& from, const std::string& to,
                        v1::SleepFile* file, CopyControl* control);

// Creates the file to which CopyBack() copies, with its size, and reserves the
// memory of its data; that of the whole file, if all of it was allocated.
// RESOURCE_EXHAUSTED: there is too little.
absl::StatusOr<UniqueFd> MakeFile(const std::string& path,
                                  const v1::SleepFile& file,
                                  CopyControl* control);
// Copies the data of `from` to `to`. DATA_LOSS: the file on the disk is
// missing, has another size or other bytes.
absl::Status CopyBack(const std::string& from, const v1::SleepFile& file,
                      int to, CopyControl* control);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SLEEP_FILE_COPIER_H_
