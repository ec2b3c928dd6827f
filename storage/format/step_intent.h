#ifndef OPTSTATE_STORAGE_FORMAT_STEP_INTENT_H_
#define OPTSTATE_STORAGE_FORMAT_STEP_INTENT_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/optimizer.h"
#include "storage/format/control_file.h"

namespace optstate::storage {

// The decision of the step in progress, in the file `step_intent`: written
// whole before step_in_progress names the step, so that any engine that
// finishes the step decides the same. Byte by byte: FORMAT.md.
struct StepIntentHeader {
  StepRecord record;      // as it will be published; without times
  double gradient_limit;  // 0: none
  uint32_t group_count;
  uint32_t parameter_count;
  uint32_t has_pushed_by;  // 1: what follows ends with pushed_by
  uint32_t reserved[2];
  uint32_t crc32c;  // of the header before it and what follows the header
};
static_assert(sizeof(StepIntentHeader) == 160);

struct StepIntentGroup {
  Hyperparams hyperparams;
  double gradient_factor;  // clip coefficient / grad_scale
};
static_assert(sizeof(StepIntentGroup) == 112);
static_assert(std::is_trivially_copyable_v<StepIntentGroup>);

// Returns the bytes of the header, the groups' hyperparameters, one byte per
// parameter: 1 when the step updates it; 8 bytes per parameter: which ranks
// pushed it.
uint64_t StepIntentBytes(uint64_t group_count, uint64_t parameter_count);

// Writes into `file`, which holds StepIntentBytes. Sets counts and checksum.
void WriteStepIntent(StepIntentHeader header,
                     absl::Span<const StepIntentGroup> groups,
                     absl::Span<const uint8_t> updated,
                     absl::Span<const uint64_t> pushed_by,
                     absl::Span<std::byte> file);

// A decoded intent, as WriteStepIntent wrote it; the spans point into `file`.
struct StepIntent {
  StepIntentHeader header;
  absl::Span<const StepIntentGroup> groups;
  absl::Span<const uint8_t> updated;
  // The ranks that pushed, by parameter: bit r: rank r's gradient is in the
  // sum. Empty: all ranks' are.
  absl::Span<const uint64_t> pushed_by;
};

// Reads the intent. DATA_LOSS when counts or checksum are wrong, or the intent
// is of another step.
absl::Status ReadStepIntent(absl::Span<const std::byte> file, uint64_t step,
                            uint64_t group_count, uint64_t parameter_count,
                            StepIntent* intent);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_FORMAT_STEP_INTENT_H_
