#ifndef OPTSTATE_SERVER_SESSION_STAGED_LOAD_H_
#define OPTSTATE_SERVER_SESSION_STAGED_LOAD_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/session/element_access.h"
#include "storage/format/load_log.h"

namespace optstate {

// What a load has brought for parameters that have a valid state: in a log, so
// that the state itself is not touched before all of it is there. What the
// state has already, bit for bit, is left out, so that a load of nothing else
// changes nothing and takes no memory. What is loaded twice counts as it came
// last and takes its place once.
//
// Threads: not thread-safe; the job's lock guards it.
class StagedLoad {
 public:
  // Gives the log room for so many bytes at least, and returns it. What is in
  // it stays.
  using Grow =
      absl::FunctionRef<absl::StatusOr<absl::Span<std::byte>>(uint64_t bytes)>;

  // Whatever it takes to load all of a layout, in pieces of this many ranks.
  static uint64_t BytesMax(const ElementAccess& elements, const Layout& layout,
                           uint64_t rank_count);

  // Empty, and in no file.
  void Reset(const LoadLogHeader& header);
  bool empty() const { return records_.empty(); }
  // In use.
  uint64_t bytes() const { return begun_ ? log_.bytes() : 0; }

  // These elements are to have these values: `range` is a block at most, and
  // was checked. Fails only as `grow` does.
  absl::Status Stage(const ElementAccess& elements, const ElementRange& range,
                     const float* values, Grow grow);
  // The same of one number of an array with a number per parameter. `present`:
  // what the state has there.
  absl::Status StageNumber(const ElementAccess& elements,
                           const ElementRange& range, const std::byte* value,
                           const std::byte* present, Grow grow);

  // The least parameter that the log has something of. Not of an empty one.
  uint32_t first_parameter() const { return first_parameter_; }
  LoadLogSeal Seal();
  // All that is to be put into place, in any order; valid until Reset.
  std::vector<LoadLogRecord> records() const;

 private:
  struct Key {
    v1::StateArray array;
    uint32_t parameter;
    uint64_t begin;
    auto operator<=>(const Key&) const = default;
    bool IsOf(const ElementRange& range) const {
      return array == range.array && parameter == range.parameter;
    }
  };
  struct Record {
    uint64_t end = 0;    // element
    uint64_t entry = 0;  // byte of the log
    bool has_checksum = false;
  };

  // `is_present`: the state has this payload already.
  absl::Status Put(const ElementAccess& elements, const ElementRange& range,
                   const std::byte* payload, bool is_present, Grow grow);
  absl::Status Append(const ElementAccess& elements, const ElementRange& range,
                      const std::byte* payload, Grow grow);
  absl::Status Reserve(uint64_t bytes, Grow grow);

  LoadLogHeader header_;
  LoadLogWriter log_;
  bool begun_ = false;
  uint64_t room_ = 0;
  std::map<Key, Record> records_;
  std::map<Key, Record>::iterator last_ = records_.end();
  uint32_t first_parameter_ = 0;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_STAGED_LOAD_H_
