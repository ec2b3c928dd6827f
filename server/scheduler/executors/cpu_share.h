#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_CPU_SHARE_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_CPU_SHARE_H_

#include <cstdint>

#include "proto/types/layout.h"
#include "server/scheduler/executors/update_executor.h"

namespace optstate::scheduler {

// Decides which tasks are the CPU's, so that it updates a fraction of the
// elements, as near as whole tiles allow.
//
// The flat space is cut into blocks, and the CPU has the first tiles of each:
// the same ones in every pass, whichever parameters take part, so that a
// record which stays on a device stays there. What is a device's lies together
// for the same reason that blocks are large: a copy of some tiles costs what a
// copy of one does.
//
// Whole parameters are counted instead, since one may be larger than a block:
// from pass to pass, so that the mean over many is the fraction, or anew in
// each pass (BeginPass()), so that the same ones are the CPU's.
//
// Threads: one at a time.
class CpuShare {
 public:
  static constexpr uint64_t kBlockElements = 256 * kTileElements;

  // Leaves no task to a device.
  CpuShare() = default;
  // `fraction` in [0, 1]; `flat_elements`: of the layout.
  CpuShare(double fraction, uint64_t flat_elements)
      : fraction_(fraction), flat_elements_(flat_elements) {}

  // Returns whether the task is the CPU's. Called once for each task.
  bool Has(const UpdateTask& task);
  // Says that the CPU gets elements that were a device's: it has so many less
  // of the whole parameters to come.
  void Charge(uint64_t elements) { cpu_elements_ += elements; }
  // Counts whole parameters anew.
  void BeginPass() { elements_ = cpu_elements_ = 0; }

 private:
  bool HasPlace(const kernels::TileView& view) const;
  bool HasWhole(uint64_t numel);

  double fraction_ = 1;
  uint64_t flat_elements_ = 0;
  // The elements of whole parameters so far: of all, and of the CPU's.
  uint64_t elements_ = 0;
  uint64_t cpu_elements_ = 0;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_CPU_SHARE_H_
