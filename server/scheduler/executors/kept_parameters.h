#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_KEPT_PARAMETERS_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_KEPT_PARAMETERS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/executors/whole_parameter.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// The place of a whole parameter's copy on a device.
struct KeptParameter {
  size_t device = 0;  // index
  // The floats of its master and of state arrays, as WholeBatch has them.
  accelerator::DeviceAddress memory;
  // The step that the copy has; kNoStep: it may be of any, or of none.
  static constexpr uint64_t kNoStep = ~uint64_t{0};
  std::atomic<uint64_t> step{kNoStep};

  void Drop() { step.store(kNoStep, std::memory_order_relaxed); }
};

// The copies of whole parameters that devices keep from step to step, as many
// as have room there: what an update reads then need not be gathered and copied
// to the device again. What it makes is copied back in each step, so records in
// host memory never lag behind, and a copy can be dropped at any time. A copy
// counts while its step is the stamp of the parameter, and until somebody else
// writes the record.
//
// The log that tiles have (ResidentRecords) is no way for these: four steps'
// gradients take at least what a record of Muon takes, and to compute its
// products once more costs the CPU what the device was to spare it.
//
// Arrays that a record has in another format than float32 are not kept: their
// rounding is the CPU's.
//
// Threads: Find(), Has() and Drop() may be called by many threads at a time;
// PlaceOf() by one, while no other uses that parameter. Allocates in Make()
// alone.
class KeptParameters {
 public:
  // Takes so much memory of each device; null: that one is lost, and keeps
  // none. `parameters`: of the layout. Errors are those of the devices, which
  // outlive this.
  static absl::StatusOr<std::unique_ptr<KeptParameters>> Make(
      absl::Span<accelerator::Device* const> devices, uint64_t device_bytes,
      size_t parameters);
  KeptParameters(const KeptParameters&) = delete;
  KeptParameters& operator=(const KeptParameters&) = delete;
  ~KeptParameters();

  // Returns the bytes of a parameter's copy.
  static uint64_t BytesOf(const WholeParameter& facts);

  // Returns the parameter's place; null: it has none.
  KeptParameter* Find(uint32_t parameter) {
    KeptParameter& kept = kept_[parameter];
    return kept.memory.is_null() ? nullptr : &kept;
  }
  // Returns its place on a device that works, by index. One without gets it
  // where most room is left; null: there is none.
  KeptParameter* PlaceOf(uint32_t parameter, const WholeRecord& record,
                         const std::vector<bool>& is_lost);

  // Drops the copies of parameters that the sub-group has elements of; all.
  void Drop(const SubGroup& sub_group);
  void Drop();
  // Says whether the sub-group has a copy that counts.
  bool Has(const SubGroup& sub_group);

  // These are of one device.
  uint64_t elements(size_t device) const { return places_[device].elements; }
  uint64_t bytes(size_t device) const { return places_[device].used; }

 private:
  struct Place {
    accelerator::Device* device = nullptr;
    accelerator::DeviceAddress memory;
    uint64_t room = 0;
    uint64_t used = 0;  // from the back, as batches are filled
    uint64_t elements = 0;

    uint64_t free() const { return room - used; }
  };

  explicit KeptParameters(size_t parameters) : kept_(parameters) {}
  KeptParameter* Admit(uint32_t parameter, const WholeParameter& facts);
  void GiveUp(uint32_t parameter);

  std::vector<Place> places_;        // by device
  std::vector<KeptParameter> kept_;  // by parameter
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_KEPT_PARAMETERS_H_
