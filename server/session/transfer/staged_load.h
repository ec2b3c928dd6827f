#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_STAGED_LOAD_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_STAGED_LOAD_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/session/transfer/element_access.h"
#include "storage/format/load_log.h"

namespace optstate::session {

// Loaded values for parameters that have a valid state, kept in a log so that
// the state itself is not touched before the load is complete. Values equal to
// the state, bit for bit, are left out, so that a load of nothing else changes
// nothing and takes no memory. When an element is loaded twice, the last value
// counts and takes space once.
//
// Threads: not thread-safe; the job's lock guards it.
class StagedLoad {
 public:
  // Gives the log room for at least this many bytes, and returns that room.
  // Existing content stays.
  using Grow =
      absl::FunctionRef<absl::StatusOr<absl::Span<std::byte>>(uint64_t bytes)>;

  // Returns the bytes that suffice to load all of a layout, in pieces of this
  // many ranks.
  static uint64_t BytesMax(const ElementAccess& elements, const Layout& layout,
                           uint64_t rank_count);

  // Makes the load empty, and in no file.
  void Reset(const storage::LoadLogHeader& header);
  bool empty() const { return records_.empty(); }
  // Returns the bytes in use.
  uint64_t bytes() const { return begun_ ? log_.bytes() : 0; }

  // Compares the state with these values for `range`, which is a block at most,
  // lies in one record, and was checked. Returns whether it has them, bit for
  // bit, and sets `payload` to theirs. May wait for a disk, and changes nothing
  // that bytes() reads. A record that is damaged has no values. Fails as the
  // store does; ABORTED: the record had others of this load before it was
  // damaged, and these were left out.
  absl::StatusOr<bool> Compare(const ElementAccess& elements,
                               const ElementRange& range, const float* values,
                               std::byte* payload);
  // Stages the payload that Compare() has set for the range. Fails as `grow`
  // does.
  absl::Status Stage(const ElementAccess& elements, const ElementRange& range,
                     const std::byte* payload, bool is_present, Grow grow) {
    return Put(elements, range, payload, is_present, grow);
  }
  // Stages one number of an array with a number per parameter. `present`: the
  // state's number.
  absl::Status StageNumber(const ElementAccess& elements,
                           const ElementRange& range, const std::byte* value,
                           const std::byte* present, Grow grow);

  // Returns the least parameter in the log, which must not be empty.
  uint32_t first_parameter() const { return first_parameter_; }
  // Returns the records, by sub-group, that could not be read.
  const std::set<size_t>& damaged() const { return damaged_; }
  // Returns those of which the load has values that were left out.
  const std::set<size_t>& left_out() const { return left_out_; }
  storage::LoadLogSeal Seal();
  // Returns all records to be written to the state, in any order; valid until
  // Reset.
  std::vector<storage::LoadLogRecord> records() const;

 private:
  struct Key {
    v1::StateArray array;
    uint32_t parameter;
    uint64_t begin;
    // NOLINTNEXTLINE(modernize-use-nullptr): a fault of clang-tidy 14
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

  // Says whether the state has these values.
  absl::StatusOr<bool> IsPresent(const ElementAccess& elements,
                                 const ElementRange& range,
                                 const float* values);
  // `is_present`: the state has this payload already.
  absl::Status Put(const ElementAccess& elements, const ElementRange& range,
                   const std::byte* payload, bool is_present, Grow grow);
  absl::Status Append(const ElementAccess& elements, const ElementRange& range,
                      const std::byte* payload, Grow grow);
  absl::Status Reserve(uint64_t bytes, Grow grow);

  storage::LoadLogHeader header_;
  storage::LoadLogWriter log_;
  bool begun_ = false;
  uint64_t room_ = 0;
  std::map<Key, Record> records_;
  std::map<Key, Record>::iterator last_ = records_.end();
  uint32_t first_parameter_ = 0;
  std::set<size_t> damaged_;
  std::set<size_t> left_out_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_STAGED_LOAD_H_
