#ifndef OPTSTATE_STORAGE_STATE_STORE_H_
#define OPTSTATE_STORAGE_STATE_STORE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/status_macros.h"
#include "proto/types/sub_groups.h"
#include "storage/arrangement.h"
#include "storage/record_lag.h"
#include "storage/record_rewrite.h"
#include "storage/record_view.h"
#include "storage/swap_state.h"
#include "storage/verify_result.h"

namespace optstate::storage {

// The arrays of a job that lie in memory whole, by flat index (see Layout).
// Null where the job has no such array. An array that an option of groups
// brings only holds memory for their tiles.
struct StateArrays {
  // The parameters as ranks map them: the layout's parameter_area_bytes(). Null
  // where they are a part of records.
  std::byte* parameters = nullptr;
  // The sums of micro-steps, only with accumulation, in one of the two: the
  // second has the parameters' sums where GradientSumOffsets says.
  float* accumulator = nullptr;
  std::byte* gradient_accumulator = nullptr;
  int64_t* step_counts = nullptr;  // one per parameter
  double* scalars = nullptr;       // one per parameter
  // The parts of records, null where records are swapped.
  // The masters, in the layout's master format; holds memory for parameters
  // that are not their own masters, null when all are.
  std::byte* master = nullptr;
  // The optimizer's state arrays, in the layout's state format.
  std::array<std::byte*, kStateArraysMax> state = {};
  // The scales of each block of the state arrays (state_scales.h).
  std::array<float*, kStateArraysMax> scale = {};
};

// The arrays of a job on their way from the files that they lie in to the store
// that is made over them: no one in between sees an address.
class StateMemory {
 public:
  StateMemory() = default;  // no arrays
  // NOLINTNEXTLINE(google-explicit-constructor): it adds nothing but the veil
  StateMemory(const StateArrays& arrays) : arrays_(arrays) {}

 private:
  friend class StateStore;

  StateArrays arrays_;
};

// The state of a job, whatever tier its records are on.
//
// A record is the state of one sub-group: masters beside parameters, the
// optimizer's arrays and their scales. It can be used while it is pinned.
// Sums of micro-steps and what there is one of for each parameter are in memory
// always, and so are parameters, unless they are a part of records.
//
// Threads: thread-safe, but for BeginPass(), during which no thread may use the
// store. Different elements of a record may be written by many threads at once.
// A thread that holds a pin takes no other: where there is room for a few
// records only, it would wait for itself.
// Size: one method for each thing that a tier may do; most have a default for
// tiers that have no disk.
class StateStore {
 public:
  enum class Access : uint8_t {
    kRead,
    kWrite,
    // Writing, by a caller that gives the whole record new values. A record
    // that is not in memory is not read but begins as zeros, so that one which
    // its disk has damaged can be used again.
    kOverwrite,
  };

  // The right to use a record, until this object's end.
  class Pin {
   public:
    explicit Pin(const RecordView& record) : record_(record) {}
    Pin(const RecordView& record, StateStore* store, Access access)
        : record_(record), store_(store), access_(access) {}
    Pin(Pin&& other) noexcept
        : record_(other.record_),
          store_(std::exchange(other.store_, nullptr)),
          access_(other.access_) {}
    Pin& operator=(Pin&&) = delete;
    ~Pin() {
      if (store_ != nullptr) store_->Unpin(record_, access_);
    }

    const RecordView& record() const { return record_; }

   private:
    const RecordView record_;
    StateStore* store_ = nullptr;  // null: nothing is to be done at the end
    const Access access_ = Access::kRead;
  };

  virtual ~StateStore() = default;
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  const Layout& layout() const { return *layout_; }
  const SubGroupTable& sub_groups() const { return sub_groups_; }

  // Says whether every record is in memory always, so that a pin is arithmetic
  // and never fails.
  virtual bool is_resident() const = 0;
  // Says whether a pin waits for no disk now: there is room in memory for every
  // record, and no commit is writing them.
  virtual bool pins_at_once() const { return is_resident(); }
  // Returns the error that ended the store for good, OK while there is none. A
  // record that cannot be read does not end a store.
  virtual absl::Status status() const = 0;
  // Makes a record usable; waits until it has been read and there is room for
  // it, and brings it up to date where it lags behind a copy (SetLag()). Errors
  // are those of the tier, and name the place of the damage; the record is then
  // as it was before.
  absl::StatusOr<Pin> PinSubGroup(size_t sub_group, Access access);

  // Begins a pass, which visits once each sub-group with wanted[index] != 0 (it
  // may visit others), in the order that suits the tier: what is in memory
  // comes first. Ends the pass before it. Returns the number of positions.
  virtual absl::StatusOr<size_t> BeginPass(
      absl::Span<const uint8_t> wanted) = 0;
  // Pins the record at a position of the pass, for writing; it may lag behind a
  // copy. Positions are to be taken about in order, by any threads.
  virtual absl::StatusOr<Pin> PinOfPass(size_t position) = 0;

  // Says whether records have files on disk, beside frames in memory.
  virtual bool has_disk() const { return false; }
  // Says whether commits bring the state to a disk, so that it survives the
  // loss of memory.
  virtual bool is_durable() const { return false; }
  // Begins to make the job durable as it is now, which is after `step`, all
  // records together; `job` is returned by durable_job() then. Waits for the
  // commit before. No record may be pinned for writing. FAILED_PRECONDITION:
  // the job is not durable.
  virtual absl::Status RequestCommit(uint64_t step, absl::string_view job);
  // Waits until the commit that was requested last is durable.
  virtual absl::Status AwaitCommit() { return absl::OkStatus(); }
  // Returns the step of the last durable commit; 0: there is none.
  virtual uint64_t durable_step() const { return 0; }
  // Returns the text that this commit was given; empty: there is none.
  virtual std::string durable_job() const { return {}; }
  // Puts the parameters that records hold into the parameter area, if there is
  // one, after a restart without memory. A store without a disk has none to
  // read.
  virtual absl::Status RestoreParameters() { return absl::OkStatus(); }

  // Copies elements [begin, +numel) of a parameter, in its dtype, to `out`. May
  // wait for a read of the disk, of parameters alone. Errors are those of
  // PinSubGroup().
  virtual absl::Status ReadParameter(uint32_t parameter, uint64_t begin,
                                     uint64_t numel, std::byte* out);
  // Says that parameters [first, +count) are going to be read: the store may
  // read them ahead, and keep them until they are released or changed, as far
  // as it has room. Never waits.
  virtual void PrefetchParameters(uint32_t /*first*/, uint32_t /*count*/) {}
  virtual void ReleaseParameters(uint32_t /*first*/, uint32_t /*count*/) {}

  // Changes the number of frames in memory. Records in frames that are given up
  // go to disk first. Then `resize` changes the memory, and sets its argument
  // to where it is from now on; the frames that stay have what they had. After
  // an error of `resize`, which is returned, the store goes on with that memory
  // too. Waits for the commit before. No record may be pinned, and meanwhile
  // only durable_step(), swap_state() and Verify() are called.
  // FAILED_PRECONDITION: the store has no frames.
  virtual absl::Status ChangeFrames(
      uint32_t frames,
      absl::FunctionRef<absl::Status(absl::Span<std::byte>*)> resize);

  // Moves the records to another arrangement, of the same layout, while the
  // store is used. BeginMove() makes the files of the target, which outlives
  // the move; from then on each record that is written goes to both
  // arrangements. CopyRecords(), which one thread calls once, copies the
  // others, and returns when nothing is left to be copied. FinishMove() does
  // the rest, in a time that does not grow with the records, and calls `commit`
  // when all is durable. If that returns OK, the target's table is the job's
  // from then on, also for an engine that finds the files after this one's
  // death; an error after it is the store's, which works no more. It returns
  // the bytes of records that were written. Any error before leaves the job as
  // it was: the move is over after one of BeginMove() or FinishMove(), and
  // needs EndMove() after one of CopyRecords(). The caller makes no pass during
  // BeginMove(), FinishMove() and EndMove(), and during FinishMove() no commit
  // is on its way, for the target has the text of the last one.
  // FAILED_PRECONDITION: the store has no disk; another move is, or none is,
  // under way.
  virtual absl::Status BeginMove(const RewriteTarget& target);
  virtual absl::Status CopyRecords();
  virtual absl::StatusOr<uint64_t> FinishMove(
      absl::FunctionRef<absl::Status()> commit);
  // Has CopyRecords() return `why`, and FinishMove() too if it comes later. Any
  // thread may call it; without a move it does nothing.
  virtual void CancelMove(const absl::Status& /*why*/) {}
  // Gives the move up, if there is one, and removes what it has written.
  // CopyRecords() has returned, or was not called.
  virtual void EndMove() {}
  // Writes the records anew for a layout that extends the job's. They are the
  // job's when its next store is opened with the target's table; until then the
  // caller changes no record. An error, or a later arrangement, leaves the job
  // as it was. FAILED_PRECONDITION: the store has no disk, or its records are
  // being moved.
  virtual absl::StatusOr<uint64_t> WriteAnew(const RewriteTarget& target);
  // Returns how far a move, or WriteAnew(), is; nullopt: none is under way.
  // Waits for no disk.
  virtual std::optional<RewriteState> rewriting() const { return std::nullopt; }
  // Removes what WriteAnew() has written, if it is there. The arrangement is
  // not the job's. A store without a disk has written nothing.
  virtual void RemoveAnew(const Arrangement& /*arrangement*/) {}

  // Reads what each record has on disk that is to survive, and compares its
  // checksums; the store may be used meanwhile. `progress` is called after each
  // record with what was found so far; false: CANCELLED. An error is one of the
  // store. One call at a time (FAILED_PRECONDITION, as without a disk), which
  // ends before the store does.
  virtual absl::StatusOr<VerifyResult> Verify(
      absl::FunctionRef<bool(const VerifyResult&)> progress);

  // Returns the time, since the store was opened, in which some thread waited
  // for a record of a pass to come from a disk; 0 without one. It costs no more
  // than a lock of the store, so that a step may ask.
  virtual uint64_t waited_ns() const { return 0; }
  // Returns how the swapping of records is doing; nullopt without a disk.
  virtual std::optional<SwapState> swap_state() const { return std::nullopt; }

  // Calls visit(record, begin, numel) for the parts of elements [begin, +numel)
  // of a parameter that lie in one record each.
  template <typename Visitor>
  absl::Status ForEachRecord(uint32_t parameter, uint64_t begin, uint64_t numel,
                             Access access, const Visitor& visit) {
    const uint64_t flat = layout_->flat_offset(parameter);
    const uint64_t end = begin + numel;
    while (begin < end) {
      OPTSTATE_ASSIGN_OR_RETURN(
          const Pin pin,
          PinSubGroup(sub_groups_.IndexOf(parameter, begin), access));
      const uint64_t part_end =
          std::min(end, pin.record().sub_group().end - flat);
      visit(pin.record(), begin, part_end - begin);
      begin = part_end;
    }
    return absl::OkStatus();
  }

  // Has records that are newer elsewhere brought up to date before they are
  // pinned by themselves; null: there are none. Set while nothing is pinned;
  // `lag` is used until it is set anew. A pass is of those who know of it, and
  // so is a commit, which takes records as they are.
  void SetLag(RecordLag* lag) { lag_ = lag; }

  // Says whether there are sums of micro-steps, and of which dtype.
  bool accumulates() const {
    return arrays_.accumulator != nullptr ||
           arrays_.gradient_accumulator != nullptr;
  }
  bool accumulates_float() const { return arrays_.accumulator != nullptr; }
  // Returns the sums of micro-steps, of float or the parameter's gradient
  // dtype; null without accumulation.
  std::byte* sums(uint32_t parameter, uint64_t begin) const;
  // The two arrays by parameter: how often it was updated, and the optimizer's
  // number (empty: it has none).
  absl::Span<int64_t> step_counts() const {
    return {arrays_.step_counts, layout_->parameters().size()};
  }
  absl::Span<double> scalars() const {
    return {arrays_.scalars,
            arrays_.scalars == nullptr ? 0 : layout_->parameters().size()};
  }
  // Returns the memory that ranks map; empty where parameters are a part of
  // records.
  absl::Span<std::byte> parameter_area() const {
    return {arrays_.parameters, arrays_.parameters == nullptr
                                    ? 0
                                    : layout_->parameter_area_bytes()};
  }

 protected:
  // Refers to `layout` and the arrays' memory, which must outlive this.
  // `sub_group_elements` is as in SubGroupTable.
  StateStore(const Layout* layout, uint64_t sub_group_elements,
             const StateMemory& memory);

  const StateArrays& arrays() const { return arrays_; }
  // Pins a record as it is. See PinSubGroup().
  virtual absl::StatusOr<Pin> PinRecord(size_t sub_group, Access access) = 0;
  // Called once for each Pin with a store.
  virtual void Unpin(const RecordView& record, Access access);

 private:
  const Layout* layout_;
  SubGroupTable sub_groups_;
  StateArrays arrays_;
  std::vector<uint64_t> gradient_sum_offsets_;
  RecordLag* lag_ = nullptr;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_STATE_STORE_H_
