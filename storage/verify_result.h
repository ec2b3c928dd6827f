#ifndef OPTSTATE_STORAGE_VERIFY_RESULT_H_
#define OPTSTATE_STORAGE_VERIFY_RESULT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace optstate::storage {

// The progress of StateStore::Verify().
struct VerifyProgress {
  uint64_t records = 0;  // looked at
  uint64_t records_total = 0;
  uint64_t skipped = 0;  // of these, those with nothing on disk to verify
  uint64_t damaged = 0;
  uint64_t bytes_read = 0;
};

// One record that is not on disk as it was written.
struct RecordDamage {
  std::string file;
  uint64_t offset_bytes = 0;  // of the record in the file
  uint64_t bytes = 0;
  // The first tile that differs, counted in the record; the number of its
  // tiles: its parameters differ; -1: the disk did not read it.
  int64_t tile = -1;
  bool is_parameters = false;
  // The parameters that have elements in the record.
  std::string first_parameter;
  std::string last_parameter;
  absl::Status status;  // DATA_LOSS, or the error of the read; says all this
};

inline constexpr size_t kVerifyDamagesMax = 256;

struct VerifyResult {
  VerifyProgress progress;
  // At most kVerifyDamagesMax; progress counts all.
  std::vector<RecordDamage> damages;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_VERIFY_RESULT_H_
