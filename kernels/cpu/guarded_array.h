#ifndef OPTSTATE_KERNELS_CPU_GUARDED_ARRAY_H_
#define OPTSTATE_KERNELS_CPU_GUARDED_ARRAY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace optstate::kernels {

// Elements between two guard zones, for tests that a function writes nothing
// outside its arrays. The first element is aligned to its own size only.
template <typename T>
class GuardedArray {
 public:
  // Puts `shift` elements more than the guard before the first element.
  explicit GuardedArray(const std::vector<T>& elements, size_t shift = 1)
      : begin_(kGuardBytes + (shift | 1) * sizeof(T)),
        numel_(elements.size()),
        bytes_(begin_ + numel_ * sizeof(T) + kGuardBytes, kGuard) {
    std::copy(elements.begin(), elements.end(), data());
  }

  T* data() { return reinterpret_cast<T*>(bytes_.data() + begin_); }
  const T* data() const {
    return reinterpret_cast<const T*>(bytes_.data() + begin_);
  }

  std::vector<T> elements() const { return {data(), data() + numel_}; }

  bool GuardsAreIntact() const {
    const auto is_guard = [](uint8_t byte) { return byte == kGuard; };
    const auto elements_end = bytes_.end() - kGuardBytes;
    return std::all_of(bytes_.begin(), bytes_.begin() + begin_, is_guard) &&
           std::all_of(elements_end, bytes_.end(), is_guard);
  }

 private:
  // The guard is longer than the widest vector.
  static constexpr size_t kGuardBytes = 512;
  static constexpr uint8_t kGuard = 0xA5;

  const size_t begin_;
  const size_t numel_;
  std::vector<uint8_t> bytes_;
};

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_CPU_GUARDED_ARRAY_H_
