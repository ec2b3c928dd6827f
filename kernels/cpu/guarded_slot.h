#ifndef OPTSTATE_KERNELS_CPU_GUARDED_SLOT_H_
#define OPTSTATE_KERNELS_CPU_GUARDED_SLOT_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/undo.h"
#include "kernels/update_kernel.h"

namespace optstate {

// An UndoSlot between two guard zones, for tests that a kernel keeps the old
// values there and writes nothing else.
class GuardedSlot {
 public:
  GuardedSlot() : pages_(std::make_unique<Pages>()) {
    std::memset(static_cast<void*>(pages_.get()), kGuard, sizeof(Pages));
    pages_->slot.saved.store(0);
  }

  UndoSlot* get() { return &pages_->slot; }

  // The slot holds these arrays, the first of them in old[0] and all equally
  // long, and nothing beside them was written.
  bool HoldsNothingBut(const std::vector<std::vector<float>>& arrays) const {
    GuardedSlot expected;
    for (size_t k = 0; k < arrays.size(); ++k) {
      if (arrays[k].empty()) continue;
      std::memcpy(expected.get()->old[k], arrays[k].data(),
                  arrays[k].size() * sizeof(float));
    }
    expected.get()->saved.store(arrays[0].size());
    return std::memcmp(pages_.get(), expected.pages_.get(), sizeof(Pages)) == 0;
  }

 private:
  static constexpr uint8_t kGuard = 0xA5;
  struct Pages {
    uint8_t before[512];
    UndoSlot slot;
    uint8_t after[512];
  };

  std::unique_ptr<Pages> pages_;
};

}  // namespace optstate

#endif  // OPTSTATE_KERNELS_CPU_GUARDED_SLOT_H_
