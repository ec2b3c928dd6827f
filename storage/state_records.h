#ifndef OPTSTATE_STORAGE_STATE_RECORDS_H_
#define OPTSTATE_STORAGE_STATE_RECORDS_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/sub_groups.h"
#include "storage/record_view.h"

namespace optstate {

// The arrays of a job whose state lies in memory whole, by flat index (see
// Layout). Null where the job has no such array. An array that an option of
// groups brings only holds memory for their tiles.
struct StateArrays {
  // The parameters as ranks map them: the layout's parameter_area_bytes().
  std::byte* parameters = nullptr;
  // The masters, in the layout's master format; holds memory for parameters
  // that are not their own masters, null when all are.
  std::byte* master = nullptr;
  // The optimizer's state arrays, in the layout's state format.
  std::array<std::byte*, kStateArraysMax> state = {};
  // The scales (kDynamic8) of each block of the state arrays.
  std::array<float*, kStateArraysMax> scale = {};
  // The sums, only with accumulation, in one of the two: the second has the
  // parameters' sums where GradientSumOffsets says.
  float* accumulator = nullptr;
  std::byte* gradient_accumulator = nullptr;
  int64_t* step_counts = nullptr;  // one per parameter
  double* scalars = nullptr;       // one per parameter
};

// All records of a job, and what it keeps for each parameter.
//
// Threads: immutable, but for what it refers to.
class StateRecords {
 public:
  // Refers to `layout` and the arrays' memory, which must outlive this.
  // `sub_group_elements` is as in SubGroupTable.
  StateRecords(const Layout* layout, uint64_t sub_group_elements,
               const StateArrays& arrays);
  StateRecords(const StateRecords&) = delete;
  StateRecords& operator=(const StateRecords&) = delete;

  const Layout& layout() const { return *layout_; }
  const SubGroupTable& sub_groups() const { return sub_groups_; }
  RecordView record(size_t sub_group) const;
  // Returns the record that has this element of a parameter.
  RecordView RecordOf(uint32_t parameter, uint64_t element) const {
    return record(sub_groups_.IndexOf(parameter, element));
  }
  // Calls visit(record, begin, numel) for the parts of elements [begin, +numel)
  // of a parameter that lie in one record each.
  template <typename Visitor>
  void ForEachRecord(uint32_t parameter, uint64_t begin, uint64_t numel,
                     const Visitor& visit) const {
    const uint64_t flat = layout_->flat_offset(parameter);
    const uint64_t end = begin + numel;
    while (begin < end) {
      const RecordView record = RecordOf(parameter, begin);
      const uint64_t part_end = std::min(end, record.sub_group().end - flat);
      visit(record, begin, part_end - begin);
      begin = part_end;
    }
  }

  // Says whether there are sums of micro-steps, and of which dtype.
  bool accumulates() const {
    return arrays_.accumulator != nullptr ||
           arrays_.gradient_accumulator != nullptr;
  }
  bool accumulates_float() const { return arrays_.accumulator != nullptr; }
  // The two arrays by parameter: how often it was updated, and the optimizer's
  // number (empty: it has none).
  absl::Span<int64_t> step_counts() const {
    return {arrays_.step_counts, layout_->parameters().size()};
  }
  absl::Span<double> scalars() const {
    return {arrays_.scalars,
            arrays_.scalars == nullptr ? 0 : layout_->parameters().size()};
  }
  // Returns the memory that ranks map.
  absl::Span<std::byte> parameter_area() const {
    return {arrays_.parameters, layout_->parameter_area_bytes()};
  }

 private:
  const Layout* layout_;
  SubGroupTable sub_groups_;
  StateArrays arrays_;
  std::vector<uint64_t> gradient_sum_offsets_;
};

}  // namespace optstate

#endif  // OPTSTATE_STORAGE_STATE_RECORDS_H_
