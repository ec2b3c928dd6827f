#ifndef OPTSTATE_STORAGE_STATE_SNAPSHOT_H_
#define OPTSTATE_STORAGE_STATE_SNAPSHOT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "storage/format/checked_file.h"
#include "storage/format/control_file.h"

namespace optstate::storage {

// A job as its files describe it.
struct StateSnapshot {
  CheckedFile description;  // job.binpb
  StepRecord record;        // the current one
  int64_t created_at_ns = 0;
  uint64_t steps_recovered = 0;
  uint64_t runs_rolled_back = 0;
};

// Reads the files without the job's lock: nothing is mapped, removed or
// changed, so an engine may be at work on them. NOT_FOUND when the directory
// holds no job; DATA_LOSS, naming the file, when one is missing or damaged.
absl::StatusOr<StateSnapshot> ReadStateSnapshot(const std::string& directory);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_STATE_SNAPSHOT_H_
