#ifndef OPTSTATE_STORAGE_TIERS_HOST_STORE_H_
#define OPTSTATE_STORAGE_TIERS_HOST_STORE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/record_lag.h"
#include "storage/record_view.h"
#include "storage/state_store.h"

namespace optstate::storage {

// The store of a job whose records are parts of arrays in memory. A pin is
// arithmetic, a pass visits all sub-groups in their order, and nothing fails.
// Records that are newer elsewhere are brought up to date when they are pinned
// by themselves; a pass is of those who know of it.
class HostStore final : public StateStore {
 public:
  // See StateStore().
  HostStore(const Layout* layout, uint64_t sub_group_elements,
            const StateMemory& memory)
      : StateStore(layout, sub_group_elements, memory) {}

  bool is_resident() const override { return true; }
  absl::Status status() const override { return absl::OkStatus(); }
  absl::StatusOr<Pin> PinSubGroup(size_t sub_group, Access access) override {
    if (RecordLag* const lag = this->lag(); lag != nullptr) {
      lag->MakeCurrent(sub_groups()[sub_group], access != Access::kRead);
    }
    return Pin(record(sub_group));
  }
  absl::StatusOr<size_t> BeginPass(
      absl::Span<const uint8_t> /*wanted*/) override {
    return sub_groups().size();
  }
  absl::StatusOr<Pin> PinOfPass(size_t position) override {
    return Pin(record(position));
  }

  RecordView record(size_t sub_group) const;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_TIERS_HOST_STORE_H_
