#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENTS_TEST_RECORD_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENTS_TEST_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate::scheduler::residents {

struct alignas(64) Line {
  std::byte bytes[64];
};

inline uint64_t LinesOf(uint64_t bytes) {
  return (bytes + sizeof(Line) - 1) / sizeof(Line);
}

inline absl::Span<std::byte> BytesOf(std::vector<Line>* lines) {
  return {reinterpret_cast<std::byte*>(lines->data()),
          lines->size() * sizeof(Line)};
}

// The arrays of one run, one behind the other in memory of others: the
// parameter, then the master, if it is another array, and the states with their
// scales. Behind each are zeros, which nobody writes.
class Record {
 public:
  static constexpr size_t kLinesMax =
      (2 + 2 * kStateArraysMax) * (kTileElements * sizeof(float) / 64 + 1);

  // `lines` has room for it, so that all stays where it is.
  Record(const kernels::UpdateKernelKey& key, size_t numel, uint64_t flat_begin,
         std::vector<Line>* lines)
      : lines_(*lines),
        begin_(lines->size()),
        parameter_bytes_(numel * SizeInBytes(key.parameter)) {
    view_.numel = numel;
    view_.flat_begin = flat_begin;
    view_.parameter = view_.master = Add(parameter_bytes_);
    if (key.master != MasterFormat::kParameter) {
      view_.master = Add(SizeInBytes(key.master) * numel);
    }
    const size_t blocks =
        (numel + kQuantizedBlockElements - 1) / kQuantizedBlockElements;
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!HasStateArray(InfoOf(key.optimizer), k, key.options)) continue;
      view_.state[k] = Add(numel * SizeInBytes(key.state));
      if (key.state != StateFormat::kDynamic8) continue;
      view_.scale[k] = static_cast<float*>(Add(4 * blocks));
    }
    end_ = lines_.size();
  }

  const kernels::TileView& view() const { return view_; }
  absl::Span<std::byte> all() {
    return BytesOf(&lines_).subspan(begin_ * sizeof(Line),
                                    (end_ - begin_) * sizeof(Line));
  }
  absl::Span<std::byte> parameter() { return all().first(parameter_bytes_); }

 private:
  void* Add(uint64_t bytes) {
    const size_t begin = lines_.size();
    lines_.resize(begin + LinesOf(bytes) + 1);
    return lines_.data() + begin;
  }

  std::vector<Line>& lines_;
  const size_t begin_;
  size_t end_ = 0;
  const size_t parameter_bytes_;
  kernels::TileView view_;
};

}  // namespace optstate::scheduler::residents

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENTS_TEST_RECORD_H_
