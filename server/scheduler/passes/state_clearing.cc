#include "server/scheduler/passes/state_clearing.h"

#include <cstddef>
#include <cstring>

#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/element_ranges.h"
#include "storage/record_view.h"
#include "storage/state_store.h"

namespace optstate::scheduler {
namespace {

void Clear(absl::Span<std::byte> bytes) {
  std::memset(bytes.data(), 0, bytes.size());
}

// Clears arrays that are float32, or have a scale for each block, and fewer
// elements than their parameter.
absl::Status ClearPrefixes(const StepPlan& plan, storage::StateStore* store,
                           uint32_t parameter) {
  const Layout& layout = plan.layout();
  const ParameterSpec& spec = layout.parameters()[parameter];
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout.has_state_array(k, spec.group)) continue;
    const uint64_t elements =
        StateElements(layout.optimizer_info(), k, spec.shape);
    OPTSTATE_RETURN_IF_ERROR(store->ForEachRecord(
        parameter, 0, elements, storage::StateStore::Access::kWrite,
        [&](const storage::RecordView& record, uint64_t begin, uint64_t numel) {
          record.ForEachStatePart(
              parameter, begin, numel,
              [&](int part, absl::Span<std::byte> bytes) {
                if ((part - storage::kStatePart0) % kStateArraysMax == k) {
                  Clear(bytes);
                }
              });
        }));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ClearState(const StepPlan& plan, const StepMemory& memory,
                        WorkerPool* pool, uint32_t first_parameter) {
  storage::StateStore& store = *memory.store;
  const bool has_prefixes = plan.layout().optimizer_info().has_prefixes();
  OPTSTATE_RETURN_IF_ERROR(ForEachElementRange(
      plan, &store, pool, first_parameter,
      storage::StateStore::Access::kOverwrite,
      [&](const storage::RecordView& record, uint32_t p, uint64_t begin,
          uint64_t end) {
        record.ForEachMasterPart(p, begin, end - begin, Clear);
        if (has_prefixes) return;
        record.ForEachStatePart(
            p, begin, end - begin,
            [](int /*part*/, absl::Span<std::byte> bytes) { Clear(bytes); });
      }));
  for (uint32_t p = first_parameter; p < plan.layout().parameters().size();
       ++p) {
    if (has_prefixes) OPTSTATE_RETURN_IF_ERROR(ClearPrefixes(plan, &store, p));
    store.step_counts()[p] = 0;
    if (!store.scalars().empty()) store.scalars()[p] = 0;
  }
  return absl::OkStatus();
}

}  // namespace optstate::scheduler
