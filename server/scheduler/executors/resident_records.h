#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENT_RECORDS_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENT_RECORDS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/executors/shared_parameters.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/gradient_log.h"
#include "server/scheduler/worker_undo.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/record_view.h"

namespace optstate::scheduler {

// One tile whose record has a place on a device.
struct ResidentTile {
  uint64_t number = 0;  // in the log
  uint64_t run = 0;
  uint32_t parameter = 0;
  size_t record = 0;  // that it is a part of
  size_t device = 0;  // index
  // The update that is given what the log has of a step.
  kernels::UpdateKernelKey key;
  const kernels::UpdateKernel* kernel = nullptr;
  // The update that is given the gradients of ranks.
  const kernels::UpdateKernel* kernel_of_ranks = nullptr;
  DType rank_dtype = DType::kFloat32;  // of these
  std::atomic<uint64_t>* stamp = nullptr;
  // The addresses of its arrays on the device, and its elements. It has a
  // parameter there that is half of its master.
  kernels::TileView on_device;
  GradientLog::TileBytes log_bytes;
  // The step that the device's arrays have; kNoStep: they may be of any, or of
  // none. Nothing of use while it is not resident.
  static constexpr uint64_t kNoStep = ~uint64_t{0};
  uint64_t device_step = 0;
  bool is_resident = false;
  // The device can copy the new parameter to its place in host memory itself.
  bool can_be_direct = false;
  // Where ranks get its parameter on the device.
  uint64_t shared_at = SharedParameters::kNoPlace;

  uint64_t numel() const { return on_device.numel; }
  bool is_shared() const { return shared_at != SharedParameters::kNoPlace; }
};

// The records of tiles that stay on devices from step to step, as many as have
// room there. Those of the job's store lag behind; the log has the gradients
// that they lack, and Settle() brings them up to date with the CPU's kernels.
// So what is on a device can be given up at any time, with the bits of today.
//
// The store may have a record in memory, elsewhere after each pin, or on disk:
// whoever calls gives the addresses, `host`, of a record that is pinned for
// writing. Only every kSteps-th step needs it.
//
// Parameters are in host memory always, newer than the record there.
//
// Ranks can have the parameters on the device as well (ShareParameters()): a
// copy, from the next update of a tile on, and as long as the record stays.
//
// Threads: different tiles may be used by many threads at a time; Concerns()
// and MakeCurrent() are thread-safe; Admit(), ShareParameters(), Drop() and
// Forget() are called by one thread while no other uses any.
// Size: one method for each event in the life of a record on a device, and one
// short question for each fact of a device.
class ResidentRecords {
 public:
  // The host memory of the records, all of which outlives them.
  static constexpr uint64_t kDirectBytesMin = uint64_t{128} << 10;
  struct Host {
    // Memory with parameters of the job, to which devices are to copy; those
    // that lie elsewhere, or that a device does not register, are copied by
    // workers. So are those that are a part of their masters: whoever updates
    // one in a device's place reads it, whatever a copy that comes late would
    // write.
    absl::Span<std::byte> parameters;
    // Neighbours of fewer bytes go through a buffer, from which workers copy
    // them: each copy costs the device and the host as much time as some of
    // these take. With 16-bit parameters a tile has 8 KiB.
    uint64_t direct_bytes_min = kDirectBytesMin;
    // The log's file, which has GradientLog::BytesNeeded(room).
    absl::Span<std::byte> log;
    GradientLog::Room room;
    // Sums when tasks may have the gradients of several ranks.
    GradientLog::Content content = GradientLog::Content::kGradient;
  };
  // Takes memory of each device, at most `device_bytes`; null: that one is
  // lost, and no record stays there. Devices take turns by so many elements of
  // the flat space. Errors are those of the devices, which outlive this.
  static absl::StatusOr<std::unique_ptr<ResidentRecords>> Make(
      absl::Span<accelerator::Device* const> devices, uint64_t device_bytes,
      uint64_t turn_elements, const Host& host);
  ResidentRecords(const ResidentRecords&) = delete;
  ResidentRecords& operator=(const ResidentRecords&) = delete;
  // The records in host memory stay as they are, and the log as it is.
  ~ResidentRecords();

  // Says whether a record like the task's can stay on a device.
  bool CanStay(const UpdateTask& task) const;
  // Returns the bytes of a record on a device.
  static uint64_t RecordBytes(const kernels::UpdateKernelKey& key,
                              const kernels::TileView& view);

  // Returns the tile of the run; null: it has no place.
  ResidentTile* Find(uint64_t run);
  // Returns whether a device, and the log, have room for the task's record.
  bool HasRoomFor(const UpdateTask& task) const;
  // Gives the task's run a place; null: it cannot stay, or there is no room.
  ResidentTile* Admit(const UpdateTask& task);

  static uint64_t BytesOfScales(uint64_t numel);
  // Says whether a step's update of the tile uses the record in host memory.
  bool NeedsRecord(const ResidentTile& tile, uint64_t step) const;
  // Makes the tile ready for its update in a step: the record in host memory is
  // up to date when it is to be copied to the device, and the log has the step.
  // Where NeedsRecord() is false, `host` needs no address but the parameter's.
  void Prepare(uint64_t step, const kernels::UpdateFactors& factors,
               absl::Span<const void* const> gradients,
               const kernels::TileView& host, ResidentTile* tile,
               WorkerUndo* undo);
  const GradientLog::Entry& EntryFor(const ResidentTile& tile,
                                     uint64_t step) const {
    return log_.EntryFor(tile.number, step);
  }
  // Brings the record in host memory up to date; from then on it is the only
  // one.
  void Settle(const kernels::TileView& host, ResidentTile* tile,
              WorkerUndo* undo);
  // Has no copy count, nor what records in host memory lack.
  void Drop();
  // Says whether the records in host memory are the only ones.
  bool AreSettled() const;
  // Forgets all tiles, which are settled, in the log too.
  void Forget();
  // See RecordLag. The slot is no other thread's meanwhile.
  bool Concerns(const SubGroup& sub_group, bool is_written);
  void MakeCurrent(const storage::RecordView& record, bool is_written,
                   WorkerUndo* undo);
  // See UpdateExecutor.
  bool IsDue(const SubGroup& sub_group);

  // Has a device keep the parameters of its records in so much memory that
  // ranks can map, as many as have room, and returns what a rank gets; a repeat
  // takes no more. `run_count`: of the layout. Errors are those of
  // SharedParameters.
  absl::StatusOr<DeviceParameters> ShareParameters(size_t device,
                                                   uint64_t bytes,
                                                   uint64_t run_count);
  // Returns where the tile's parameter is to be for ranks; is_shared().
  accelerator::DeviceAddress SharedAddress(const ResidentTile& tile) const {
    return shared_->At(tile.device, tile.shared_at);
  }
  // Says that the parameter there is that of the parameter area.
  void NoteShared(const ResidentTile& tile, uint64_t step) {
    if (tile.is_shared()) shared_->MarkCurrent(tile.run, step);
  }

  // These are of one device.
  uint64_t shared_bytes(size_t device) const {
    return shared_ == nullptr ? 0 : shared_->bytes(device);
  }
  uint64_t elements(size_t device) const { return places_[device].elements; }
  uint64_t bytes(size_t device) const { return places_[device].used(); }
  uint64_t log_bytes() const { return host_.log.size(); }
  uint64_t direct_bytes_min() const { return host_.direct_bytes_min; }

 private:
  struct Place {
    accelerator::Device* device = nullptr;
    accelerator::DeviceAddress memory;
    uint64_t room = 0;
    // Masters, or the parameters that are half of them, from the front, and all
    // else from the back, so that those of tiles that were added one after the
    // other are copied at once.
    uint64_t masters = 0;
    uint64_t states = 0;
    uint64_t elements = 0;
    bool is_log_registered = false;
    bool are_parameters_registered = false;

    uint64_t used() const { return states + masters; }
    uint64_t free() const { return room - used(); }
  };

  ResidentRecords() = default;
  absl::Status Register(Place* place);
  GradientLog::TileBytes LogBytesOf(const UpdateTask& task) const;
  void CatchUp(const kernels::TileView& host, ResidentTile* tile,
               WorkerUndo* undo);
  // Returns whether the record in host memory lacks an update.
  bool Lags(const ResidentTile& tile) const;
  // Calls visit(tile) for tiles of the sub-group that are resident.
  template <typename Visit>
  void ForEachResidentIn(const SubGroup& sub_group, const Visit& visit) const;
  absl::Mutex& MutexOf(const SubGroup& sub_group) {
    // Sub-groups begin at multiples of some number of tiles.
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
    return mutexes_[(sub_group.begin / kTileElements * kGolden) >> 60];
  }
  // Returns whether the device of the place can copy to these bytes itself.
  bool CanBeDirect(const Place& place, const void* parameter,
                   uint64_t bytes) const;
  // Says whether the record in host memory is to be up to date before a step.
  // Records take turns, so that each step has a part of them.
  static bool IsDue(const ResidentTile& tile, uint64_t step) {
    return (step + tile.record) % GradientLog::kSteps == 0;
  }
  // Gives the tile a place for its parameter, if its device shares them.
  void SharePlace(ResidentTile* tile);
  void MarkStale(const ResidentTile& tile) {
    if (tile.is_shared()) shared_->MarkStale(tile.run);
  }
  // Returns a place for a record that begins at an element of the flat space;
  // null: none has room.
  Place* PlaceWithRoom(uint64_t flat_begin, uint64_t bytes);
  void TakePlace(const kernels::TileView& host, Place* place,
                 ResidentTile* tile) const;

  uint64_t turn_elements_ = 1;
  // The turn of the last tile, and the device that had it.
  uint64_t turn_ = ~uint64_t{0};
  size_t turn_device_ = 0;
  Host host_;
  GradientLog log_;
  std::vector<Place> places_;                 // by device
  std::unique_ptr<SharedParameters> shared_;  // null: no device shares any
  std::deque<ResidentTile> tiles_;            // by number
  std::vector<uint32_t> by_run_;              // number + 1; 0: none
  // By flat element.
  absl::btree_map<uint64_t, ResidentTile*> by_element_;
  // One thread at a time makes a record current.
  std::array<absl::Mutex, 16> mutexes_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENT_RECORDS_H_
