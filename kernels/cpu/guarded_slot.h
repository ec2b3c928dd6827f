#ifndef OPTSTATE_KERNELS_CPU_GUARDED_SLOT_H_
#define OPTSTATE_KERNELS_CPU_GUARDED_SLOT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/undo.h"

namespace optstate::kernels {

// An UndoSlot between two guard zones, for tests that a kernel keeps the old
// values there and writes nothing else.
class GuardedSlot {
 public:
  GuardedSlot() : pages_(std::make_unique<Pages>()) {
    std::memset(static_cast<void*>(pages_.get()), kGuard, sizeof(Pages));
    pages_->slot.progress.store(0);
    pages_->slot.saved.store(0);
  }

  UndoSlot* get() { return &pages_->slot; }

  // Returns whether, after an update, what progress calls in flight are the
  // last elements of these arrays, the first of them in old[0] and all equally
  // long or empty, and whether nothing beside the ring parts of those that are
  // not empty was written.
  bool HoldsTheEndOf(const std::vector<std::vector<float>>& arrays) const {
    const UndoSlot& slot = pages_->slot;
    const auto [begin, position, length, phase] =
        InFlightOf(slot.progress.load());
    if (begin + length != arrays[0].size()) return false;
    GuardedSlot expected;
    expected.get()->progress.store(slot.progress.load());
    for (size_t k = 0; k < arrays.size(); ++k) {
      if (arrays[k].empty()) continue;
      std::memcpy(expected.get()->old[k], slot.old[k], sizeof(slot.old[k]));
      if (phase != UndoPhase::kOldValues) continue;
      if (std::memcmp(slot.old[k] + position, arrays[k].data() + begin,
                      length * sizeof(float)) != 0) {
        return false;
      }
    }
    return Equals(expected);
  }

  // HoldsTheEndOf() for a kernel that keeps a xor, unless its last vector was a
  // single one: what is in flight is all of it stored, so the three give the
  // xor.
  bool HoldsXorOfTheEnd(const std::vector<float>& old_master,
                        const std::vector<float>& state0,
                        const std::vector<float>& state1) const {
    const UndoSlot& slot = pages_->slot;
    const auto [begin, position, length, phase] =
        InFlightOf(slot.progress.load());
    if (phase == UndoPhase::kOldValues) return true;
    if (phase != UndoPhase::kMaster) return false;
    for (size_t i = 0; i < length; ++i) {
      const auto bits = [at = begin + i](const std::vector<float>& array) {
        return std::bit_cast<uint32_t>(array[at]);
      };
      if (std::bit_cast<uint32_t>(slot.old[0][position + i]) !=
          (bits(old_master) ^ bits(state0) ^ bits(state1))) {
        return false;
      }
    }
    return true;
  }

  // Returns whether, after Accumulate, the slot holds this sum, and nothing
  // else was written.
  template <typename Element>
  bool HoldsNothingBut(const std::vector<Element>& sum) const {
    GuardedSlot expected;
    if (!sum.empty()) {
      std::memcpy(expected.get()->old_sum, sum.data(),
                  sum.size() * sizeof(Element));
    }
    expected.get()->saved.store(sum.size());
    return Equals(expected);
  }

 private:
  static constexpr uint8_t kGuard = 0xA5;
  struct Pages {
    uint8_t before[512];
    UndoSlot slot;
    uint8_t after[512];
  };

  bool Equals(const GuardedSlot& other) const {
    return std::memcmp(pages_.get(), other.pages_.get(), sizeof(Pages)) == 0;
  }

  std::unique_ptr<Pages> pages_;
};

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_CPU_GUARDED_SLOT_H_
