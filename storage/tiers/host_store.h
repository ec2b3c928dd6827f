#ifndef OPTSTATE_STORAGE_TIERS_HOST_STORE_H_
#define OPTSTATE_STORAGE_TIERS_HOST_STORE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/record_view.h"
#include "storage/state_store.h"

namespace optstate::storage {

// The store of a job whose records are parts of arrays in memory. A pin is
// arithmetic, a pass visits all sub-groups in their order, and nothing fails.
class HostStore final : public StateStore {
 public:
  // See StateStore().
  HostStore(const Layout* layout, uint64_t sub_group_elements,
            const StateMemory& memory)
      : StateStore(layout, sub_group_elements, memory) {}

  bool is_resident() const override { return true; }
  absl::Status status() const override { return absl::OkStatus(); }
  absl::StatusOr<size_t> BeginPass(
      absl::Span<const uint8_t> /*wanted*/) override {
    return sub_groups().size();
  }
  absl::StatusOr<Pin> PinOfPass(size_t position) override {
    return Pin(record(position));
  }

  RecordView record(size_t sub_group) const;

 private:
  absl::StatusOr<Pin> PinRecord(size_t sub_group, Access /*access*/) override {
    return Pin(record(sub_group));
  }
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_TIERS_HOST_STORE_H_
