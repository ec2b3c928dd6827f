#ifndef OPTSTATE_SERVER_SESSION_TESTING_DAMAGEABLE_STORE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_DAMAGEABLE_STORE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/array_format.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "storage/record_view.h"
#include "storage/state_scales.h"
#include "storage/state_store.h"
#include "storage/tiers/host_store.h"

namespace optstate::session {

// A store with memory of its own, all zeros, whose records a test can damage:
// what users see of a disk, without one.
//
// Threads: not thread-safe.
class DamageableStore final : public storage::StateStore {
 public:
  // `layout` must outlive this. Without a parameter area parameters are said to
  // lie in the records, and are not there.
  explicit DamageableStore(const Layout* layout,
                           uint64_t sub_group_elements = kTileElements,
                           bool has_parameter_area = true)
      : DamageableStore(layout, sub_group_elements,
                        std::make_unique<Memory>(*layout, has_parameter_area)) {
  }

  // Has each pin of this record fail. DATA_LOSS, until it is overwritten; other
  // errors stay.
  void Fail(size_t sub_group, absl::Status error) {
    errors_[sub_group] = std::move(error);
  }
  void Damage(size_t sub_group) {
    Fail(sub_group, absl::DataLossError("records-0: a bit is wrong"));
  }
  // Returns how often a record was asked for.
  uint64_t pins() const { return pins_; }
  // Returns a record, damaged or not.
  storage::RecordView record(size_t sub_group) const {
    return home_.record(sub_group);
  }

  bool is_resident() const override { return false; }
  absl::Status status() const override { return absl::OkStatus(); }
  absl::StatusOr<Pin> PinRecord(size_t sub_group, Access access) override {
    ++pins_;
    const auto error = errors_.find(sub_group);
    if (error != errors_.end()) {
      if (access != Access::kOverwrite || !absl::IsDataLoss(error->second)) {
        return error->second;
      }
      errors_.erase(error);
      for (int part = 0; part < storage::kRecordPartCount; ++part) {
        const absl::Span<std::byte> bytes = record(sub_group).part(part);
        std::fill(bytes.begin(), bytes.end(), std::byte{0});
      }
    }
    return Pin(record(sub_group));
  }
  absl::StatusOr<size_t> BeginPass(absl::Span<const uint8_t>) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<Pin> PinOfPass(size_t) override {
    return absl::UnimplementedError("");
  }

 private:
  struct Memory {
    Memory(const Layout& layout, bool has_parameter_area)
        : parameters(layout.parameter_area_bytes()),
          master(layout.flat_elements() * sizeof(float)),
          step_counts(layout.parameters().size()),
          scalars(layout.parameters().size()) {
      if (has_parameter_area) arrays.parameters = parameters.data();
      arrays.master = master.data();
      arrays.step_counts = step_counts.data();
      arrays.scalars = scalars.data();
      for (size_t k = 0; k < kStateArraysMax; ++k) {
        state[k].resize(layout.flat_elements() * sizeof(float));
        arrays.state[k] = state[k].data();
        if (!storage::HasScales(ArrayFormat(layout, static_cast<int>(k)))) {
          continue;
        }
        scale[k].resize(layout.flat_elements() / kQuantizedBlockElements);
        arrays.scale[k] = scale[k].data();
      }
    }

    std::vector<std::byte> parameters, master;
    std::vector<int64_t> step_counts;
    std::vector<double> scalars;
    std::array<std::vector<std::byte>, kStateArraysMax> state;
    std::array<std::vector<float>, kStateArraysMax> scale;
    storage::StateArrays arrays;
  };

  DamageableStore(const Layout* layout, uint64_t sub_group_elements,
                  std::unique_ptr<Memory> memory)
      : storage::StateStore(layout, sub_group_elements, memory->arrays),
        memory_(std::move(memory)),
        home_(layout, sub_group_elements, memory_->arrays) {}

  const std::unique_ptr<Memory> memory_;
  const storage::HostStore home_;
  std::map<size_t, absl::Status> errors_;  // by sub-group
  uint64_t pins_ = 0;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_DAMAGEABLE_STORE_H_
