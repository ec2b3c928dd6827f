#ifndef OPTSTATE_STORAGE_RECORD_KEEPER_H_
#define OPTSTATE_STORAGE_RECORD_KEEPER_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "storage/record_view.h"

namespace optstate::storage {

// Keeps the old values of a job's records before they are overwritten, for one
// user at a time: speculation, which puts them back when the step is decided
// otherwise, or a snapshot, which reads the records as they were at one step
// while later ones are taken.
//
// Kept values belong to an epoch, a number that their user chooses: the step
// that is speculated about, or the step of which a snapshot is. Each run
// (proto/types/runs.h) has an entry with the epoch of its kept values, and is
// kept at most once in an epoch: the kept value is the one before the first
// write. Only the newest epoch can be asked for.
//
// Crashes: entries and values lie in a file of the job that outlives the engine
// (bytes: "speculation" in format/FORMAT.md). An entry is stored when the
// values are complete, and before the first new value is. So after the death of
// the process at any instruction, a run without an entry has its old values in
// the record, and one with an entry has them here. Putting back a run can be
// repeated until its entry is gone.
//
// There is no snapshot yet: Begin, Read and Release, which a snapshot needs and
// speculation does not, are called by tests alone.
//
// Threads: each run by many threads at once. Those that want one run at a
// moment take turns, for as long as its values are copied.
// Allocates only in the constructor.
class RecordKeeper {
 public:
  // The part of one parameter within one tile.
  struct RunRange {
    uint64_t run = 0;
    uint32_t parameter = 0;
    uint64_t begin = 0;  // element of the parameter
    uint64_t numel = 0;
  };
  // Bytes of a run's values: first those that make up its masters, one piece
  // with part == kMasterPart each, then its state arrays and scales.
  using Visitor =
      absl::FunctionRef<void(int part, absl::Span<const std::byte> bytes)>;

  // Returns the bytes that the keeper of a job with this layout needs.
  static uint64_t BytesNeeded(const Layout& layout);

  // `memory` has BytesNeeded(), zeros or from a former engine. Both outlive
  // this.
  RecordKeeper(const Layout* layout, absl::Span<std::byte> memory);

  // Begins an epoch, which is not 0, and forgets what an earlier use of the
  // same number has kept. No other call is under way. A user that goes on with
  // an epoch of a former engine does not call this.
  void Begin(uint64_t epoch);

  // Forgets what is kept of all epochs. Entries may hold anything before it: of
  // a layout that has grown they lie where values were kept.
  void ForgetAll();

  // Keeps the values of elements [begin, +numel) of a parameter, which are
  // whole runs within the record, but those of runs that are kept, or released,
  // in this epoch already. After it the elements may be overwritten. Returns
  // the number of runs that it has kept.
  uint64_t BeforeWrite(const RecordView& record, uint64_t epoch,
                       uint32_t parameter, uint64_t begin, uint64_t numel);

  // Says whether the run's values of this epoch are kept.
  bool IsKept(uint64_t run, uint64_t epoch) const {
    return entry(run).load(std::memory_order_acquire) == epoch;
  }

  // Calls visit with the run's values at the epoch's beginning: the kept ones,
  // or those in the record when they were not overwritten. A thread that is
  // about to overwrite them waits meanwhile, so that visit does no more than
  // copy.
  void Read(const RecordView& record, uint64_t epoch, const RunRange& run,
            Visitor visit) const;
  // Says that the run will not be read in this epoch any more, so that it need
  // not be kept. Kept values are then gone.
  void Release(uint64_t run, uint64_t epoch);

  // Puts the kept values of a run back into the record, then calls `restored`,
  // which repairs what depends on them (a parameter that is not part of its
  // master, the run's stamp), then forgets them. Returns false, doing nothing,
  // when the run has none of this epoch. `restored` may be called again after a
  // crash.
  bool RollBackRun(const RecordView& record, uint64_t epoch,
                   const RunRange& run, absl::FunctionRef<void()> restored);

 private:
  // Holds a run's turn.
  class Turn;

  static uint64_t EntryBytes(const Layout& layout);
  std::atomic<uint64_t>& entry(uint64_t run) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(memory_.data())[run];
  }
  // Returns the kept masters; each element has 4 bytes, in any format.
  std::byte* KeptMaster(uint64_t flat) const;
  // Returns where a state array, or its scales, of elements from `flat` on is
  // kept.
  std::byte* KeptState(int part, uint64_t flat) const;
  void Keep(const RecordView& record, const RunRange& run);

  const Layout* layout_;
  absl::Span<std::byte> memory_;
  // Where each state part begins in memory_.
  std::array<uint64_t, kRecordPartCount> part_offsets_ = {};
  // The turns by run: 1 while a thread has its turn. They are not in the file:
  // a process that died holds none.
  const std::unique_ptr<std::atomic<uint8_t>[]> turns_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_RECORD_KEEPER_H_
