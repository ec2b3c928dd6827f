#ifndef OPTSTATE_SERVER_SCHEDULER_GRADIENT_ADDRESSES_H_
#define OPTSTATE_SERVER_SCHEDULER_GRADIENT_ADDRESSES_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "proto/types/dtype.h"
#include "proto/types/partition.h"
#include "server/scheduler/piece_table.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"
#include "storage/state_store.h"

namespace optstate::scheduler {

// Finds the gradients of a run: the addresses that are summed, in order of
// ranks. Immutable; `plan` and `store` outlive it.
class GradientAddresses {
 public:
  // Memory for the addresses of one run.
  using Buffer = std::array<const void*, kWorldSizeMax>;
  using HasPushed = absl::FunctionRef<bool(uint32_t rank, uint32_t parameter)>;

  GradientAddresses(const StepPlan* plan, const storage::StateStore* store)
      : plan_(*plan), store_(*store) {}

  // Returns the addresses, in ranks' gradient areas, of the elements from
  // `begin` on, which lie in the piece. When replicated, those of all ranks
  // that have pushed the parameter.
  absl::Span<const void* const> Pushed(
      uint32_t parameter, const PieceTable::Entry& piece, uint64_t begin,
      absl::Span<const std::byte* const> gradient_areas, HasPushed has_pushed,
      Buffer* buffer) const {
    const DType dtype = plan_.layout().parameters()[parameter].gradient_dtype;
    const uint64_t offset_bytes = piece.gradient_offset_bytes +
                                  (begin - piece.begin) * SizeInBytes(dtype);
    if (plan_.is_replicated()) {
      return OfRanks(parameter, offset_bytes, gradient_areas, has_pushed,
                     buffer);
    }
    (*buffer)[0] = gradient_areas[piece.rank] + offset_bytes;
    return absl::MakeConstSpan(*buffer).first(1);
  }
  // Returns the addresses of what the update takes, of
  // StepPlan::sum_dtype(): the sum of micro-steps or what was pushed.
  absl::Span<const void* const> OfUpdate(uint32_t parameter,
                                         const PieceTable::Entry& piece,
                                         uint64_t begin,
                                         const StepUpdate& update,
                                         Buffer* buffer) const;

 private:
  // Returns the addresses at an offset of each rank that has pushed.
  static absl::Span<const void* const> OfRanks(
      uint32_t parameter, uint64_t offset_bytes,
      absl::Span<const std::byte* const> gradient_areas, HasPushed has_pushed,
      Buffer* buffer);

  const StepPlan& plan_;
  const storage::StateStore& store_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_GRADIENT_ADDRESSES_H_
