#ifndef OPTSTATE_STORAGE_FORMAT_STEP_INTENT_H_
#define OPTSTATE_STORAGE_FORMAT_STEP_INTENT_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/format/control_file.h"

namespace optstate {

// The decision of the step in progress, in the file `step_intent`: written
// whole before step_in_progress names the step, so that whoever finishes the
// step takes the same one. Byte by byte: FORMAT.md.
struct StepIntentHeader {
  StepRecord record;  // as it will be published; without times
  double gradient_factor;
  uint32_t group_count;
  uint32_t parameter_count;
  uint32_t reserved[3];
  uint32_t crc32c;  // of what is before it and what follows the header
};
static_assert(sizeof(StepIntentHeader) == 160);

struct StepIntentGroup {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  uint64_t maximize;
};
static_assert(sizeof(StepIntentGroup) == 48);

// The header, the groups' hyperparameters, one byte per parameter: 1 when the
// step updates it.
uint64_t StepIntentBytes(uint64_t group_count, uint64_t parameter_count);

// Writes into `file`, which holds StepIntentBytes. Sets counts and checksum.
void WriteStepIntent(StepIntentHeader header,
                     absl::Span<const StepIntentGroup> groups,
                     absl::Span<const uint8_t> updated,
                     absl::Span<std::byte> file);

// What WriteStepIntent wrote; the spans point into `file`.
struct StepIntent {
  StepIntentHeader header;
  absl::Span<const StepIntentGroup> groups;
  absl::Span<const uint8_t> updated;
};

// DATA_LOSS when counts or checksum are wrong, or it is of another step.
absl::Status ReadStepIntent(absl::Span<const std::byte> file, uint64_t step,
                            uint64_t group_count, uint64_t parameter_count,
                            StepIntent* intent);

}  // namespace optstate

#endif  // OPTSTATE_STORAGE_FORMAT_STEP_INTENT_H_
