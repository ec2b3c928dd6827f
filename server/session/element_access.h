#ifndef OPTSTATE_SERVER_SESSION_ELEMENT_ACCESS_H_
#define OPTSTATE_SERVER_SESSION_ELEMENT_ACCESS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "optstate/v1/types.pb.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "storage/state_records.h"

namespace optstate {

// Elements [begin, +numel) of an array of a parameter. Of arrays with a number
// per parameter: those of parameters [begin, +numel), and `parameter` is 0.
struct ElementRange {
  v1::StateArray array = v1::STATE_ARRAY_UNSPECIFIED;
  uint32_t parameter = 0;
  uint64_t begin = 0;
  uint64_t numel = 0;
};

// Elements of a job's state wherever they are and in whatever format, as floats
// and as payloads: what a load brings, in the form in which it can be kept
// until it is put into place. Masters are payloads of float32, state arrays
// have their own format; those in blocks have their scale before each block.
//
// Threads: may be copied freely; Write to different ranges by many at once.
class ElementAccess {
 public:
  // By element arrays are gone through in blocks of at most so many elements,
  // from a block's begin on where the format has blocks.
  static constexpr uint64_t kBlockElements = kQuantizedBlockElements;
  static constexpr uint64_t kBlockBytesMax = kBlockElements * sizeof(float);

  // `records`, with its layout, outlives this.
  explicit ElementAccess(const StateRecords* records)
      : layout_(&records->layout()), records_(records) {}

  // Step counts and numbers of optimizers: 8 bytes each, which are their own
  // payload.
  static bool IsPerParameter(v1::StateArray array) {
    return array == v1::STATE_ARRAY_STEP_COUNT ||
           array == v1::STATE_ARRAY_SCALAR;
  }
  // Of an array that is not per parameter; as of the parameter itself for those
  // that the optimizer does not have.
  uint64_t ElementsOf(v1::StateArray array, const ParameterSpec& spec) const;
  // INVALID_ARGUMENT when the job has no such elements, or they cut a block.
  absl::Status Check(const ElementRange& range) const;

  // Of ranges that were checked, and but for PayloadBytes of a block at most.
  uint64_t PayloadBytes(v1::StateArray array, uint64_t numel) const;
  void ReadFloats(const ElementRange& range, float* out) const;
  // What would put it back as it is, bit for bit.
  void ReadPayload(const ElementRange& range, std::byte* out) const;
  void MakePayload(const ElementRange& range, const float* in,
                   std::byte* out) const;

  // Puts a payload of any size into place.
  void Write(const ElementRange& range, const std::byte* payload) const;

 private:
  static int IndexOf(v1::StateArray array) {
    return static_cast<int>(array) - v1::STATE_ARRAY_STATE_0;
  }
  // Of the range's array, which is a state array: how it is kept.
  StateFormat FormatOf(const ElementRange& range) const;
  bool HasScale(const ElementRange& range) const {
    return range.array != v1::STATE_ARRAY_MASTER &&
           FormatOf(range) == StateFormat::kDynamic8;
  }
  bool IsNeverNegativeIn(const ElementRange& range) const;
  void WriteMasters(const ElementRange& range, const float* in) const;
  void WriteBlock(const ElementRange& range, const std::byte* payload) const;

  const Layout* layout_;
  const StateRecords* records_;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_ELEMENT_ACCESS_H_
