#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_ELEMENT_ACCESS_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_ELEMENT_ACCESS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "optstate/v1/types.pb.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "storage/state_scales.h"
#include "storage/state_store.h"

namespace optstate::session {

// Elements [begin, +numel) of an array of a parameter. In arrays with a number
// per parameter, the range is over parameters [begin, +numel), and `parameter`
// is 0.
struct ElementRange {
  v1::StateArray array = v1::STATE_ARRAY_UNSPECIFIED;
  uint32_t parameter = 0;
  uint64_t begin = 0;
  uint64_t numel = 0;
};

// Gives access to elements of a job's state, in every location and format, as
// floats and as payloads. A payload is the form in which loaded values are kept
// until they are written to the state. Payloads of masters are float32, those
// of state arrays have the array's format; formats in blocks put the scale
// before each block.
//
// Threads: may be copied freely; threads may Write to different ranges at once.
class ElementAccess {
 public:
  // Element arrays are processed in blocks of at most this many elements,
  // aligned to the format's blocks where it has any.
  static constexpr uint64_t kBlockElements = kQuantizedBlockElements;
  static constexpr uint64_t kBlockBytesMax = kBlockElements * sizeof(float);

  // `store`, with its layout, must outlive this object.
  explicit ElementAccess(storage::StateStore* store)
      : layout_(&store->layout()), store_(store) {}

  // Returns true for step counts and optimizer scalars: 8 bytes each, which are
  // their own payload.
  static bool IsPerParameter(v1::StateArray array) {
    return array == v1::STATE_ARRAY_STEP_COUNT ||
           array == v1::STATE_ARRAY_SCALAR;
  }
  // Returns the size of an array that is not per parameter; the parameter's own
  // size for arrays that the optimizer does not have.
  uint64_t ElementsOf(v1::StateArray array, const ParameterSpec& spec) const;
  // Returns the sub-group of the record that has this element.
  size_t RecordOf(uint32_t parameter, uint64_t element) const {
    return store_->sub_groups().IndexOf(parameter, element);
  }
  // Returns how many elements the record has of the parameter from this one on,
  // were the parameter without end.
  uint64_t RecordElementsFrom(uint32_t parameter, uint64_t element) const {
    return store_->sub_groups()[RecordOf(parameter, element)].end -
           layout_->flat_offset(parameter) - element;
  }
  // Returns INVALID_ARGUMENT when the job has no such elements, or the range
  // cuts a block.
  absl::Status Check(const ElementRange& range) const;

  // The ranges below must have been checked; all but those of PayloadBytes span
  // at most a block. Errors are those of the store.
  uint64_t PayloadBytes(v1::StateArray array, uint64_t numel) const;
  absl::Status ReadFloats(const ElementRange& range, float* out) const;
  // Reads the payload that would restore the range as it is, bit for bit.
  absl::Status ReadPayload(const ElementRange& range, std::byte* out) const;
  void MakePayload(const ElementRange& range, const float* in,
                   std::byte* out) const;

  // Writes a payload of any size to the state.
  absl::Status Write(const ElementRange& range, const std::byte* payload) const;

 private:
  static int IndexOf(v1::StateArray array) {
    return static_cast<int>(array) - v1::STATE_ARRAY_STATE_0;
  }
  // Returns the storage format of the range's array, which is a state array.
  StateFormat FormatOf(const ElementRange& range) const;
  bool HasScale(const ElementRange& range) const {
    return range.array != v1::STATE_ARRAY_MASTER &&
           storage::HasScales(FormatOf(range));
  }
  bool IsNeverNegativeIn(const ElementRange& range) const;
  absl::Status WriteMasters(const ElementRange& range, const float* in) const;
  absl::Status WriteBlock(const ElementRange& range,
                          const std::byte* payload) const;

  const Layout* layout_;
  storage::StateStore* store_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_ELEMENT_ACCESS_H_
