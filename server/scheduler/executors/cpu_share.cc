#include "server/scheduler/executors/cpu_share.h"

#include <algorithm>

namespace optstate::scheduler {

bool CpuShare::Has(const UpdateTask& task) {
  return task.whole != nullptr ? HasWhole(task.view.numel)
                               : HasPlace(task.view);
}

bool CpuShare::HasPlace(const kernels::TileView& view) const {
  const uint64_t begin = view.flat_begin / kBlockElements * kBlockElements;
  const uint64_t size = std::min(kBlockElements, flat_elements_ - begin);
  // A tile is where most of it is.
  const double middle = static_cast<double>(view.flat_begin - begin) +
                        static_cast<double>(view.numel) / 2;
  return middle < fraction_ * static_cast<double>(size);
}

// Keeps the CPU's part of the parameters so far as near to its fraction as it
// can.
bool CpuShare::HasWhole(uint64_t numel) {
  elements_ += numel;
  const double with_this =
      static_cast<double>(cpu_elements_) + static_cast<double>(numel) / 2;
  if (with_this > fraction_ * static_cast<double>(elements_)) return false;
  cpu_elements_ += numel;
  return true;
}

}  // namespace optstate::scheduler
