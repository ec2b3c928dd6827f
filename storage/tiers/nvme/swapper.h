#ifndef OPTSTATE_STORAGE_TIERS_NVME_SWAPPER_H_
#define OPTSTATE_STORAGE_TIERS_NVME_SWAPPER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "storage/tiers/nvme/committer.h"
#include "storage/tiers/nvme/frame_checks.h"
#include "storage/tiers/nvme/parameter_cache.h"
#include "storage/tiers/nvme/read_queue.h"
#include "storage/tiers/nvme/record_cache.h"
#include "storage/tiers/nvme/record_mover.h"
#include "storage/tiers/nvme/store_context.h"
#include "storage/tiers/nvme/store_monitor.h"
#include "storage/tiers/nvme/verifier.h"

namespace optstate::nvme {

// Reads records to frames and writes them to their slots.
//
// A write begins when the record is chosen (`is_writing`); it is submitted when
// its checksums are there. Those that no other thread has taken are taken by
// SumOneAndWrite(), one between two polls of the engine.
//
// While records move to another arrangement a frame is written to both, and its
// write is over when both are.
//
// Invariants: a record is written only to SlotToWrite(), while it has no pin
// and neither Verify() nor the parameter cache is reading that slot, nor a move
// copying it; while a
// commit is made, only if it belongs to it: the slots that are not durable hold
// the step that is being committed.
//
// Threads: only the thread of I/O, but for parameters; the store's lock is
// held. SumOneAndWrite() releases it meanwhile.
class Swapper {
 public:
  // The arguments must outlive this object.
  Swapper(const StoreContext* context, StoreMonitor* monitor,
          RecordCache* cache, ReadQueue* queue, FrameChecks* checks,
          Committer* committer, const Verifier* verifier,
          const ParameterCache* parameters, RecordMover* mover);

  // Writes the records of the commit that is being made, as far as they can be
  // written now.
  void Flush();
  // Writes the records of frames that are to be given up.
  void Vacate();
  // Reads the records that threads wait for, as far as there are frames.
  void ReadDemanded();
  // Reads the next records of the pass as far as there are frames. Those that
  // are waited for come first.
  void ReadAhead();
  // Writes records that the pass is done with, as many as there are frames
  // wanted, so that frames are there when the next records are read. Those that
  // the pass is still to take are written where a thread waits for another
  // record, and there is nothing else to write.
  void WriteBehind();

  // Says whether a record of such a frame is newer than on disk.
  bool is_vacating() const;
  // Returns the number of such records.
  uint64_t records_to_vacate() const;
  // Forgets what is to be written, and is ready for the context's present
  // frames.
  void Reset();

  // Says whether there are writes that have begun and lack checksums.
  bool has_unsummed() const;
  // Takes the checksums of one of them, and writes it.
  void SumOneAndWrite();
  // Goes on after the request of a frame.
  void Complete(uint32_t frame);
  // Goes on after the frame's write to the next arrangement (RecordMover).
  void CompleteMirror(uint32_t frame);

  // Returns whether records are read with their section of parameters: where
  // they have no other place always, else when it is said here.
  bool reads_parameters() const;
  void set_reads_parameters(bool reads_parameters);

 private:
  bool StartRead(uint32_t record, bool is_demanded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  bool IsToVacate(uint32_t record) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void SubmitRead(uint32_t frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void CompleteRead(uint32_t frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  // Begins writes of the frames of a list, from a frame on, until so many are
  // being written.
  void StartWrites(RecordCache::List list, bool is_demanded, size_t writing_max,
                   uint32_t from_frame = 0)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  bool MayBeWritten(uint32_t record, bool is_demanded) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void StartWrite(uint32_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void SubmitWrite(uint32_t frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);
  void CompleteWrite(uint32_t frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(monitor_.mu);

  const StoreContext& context_;
  StoreMonitor& monitor_;
  RecordCache& cache_ ABSL_GUARDED_BY(monitor_.mu);
  ReadQueue& queue_ ABSL_GUARDED_BY(monitor_.mu);
  FrameChecks& checks_ ABSL_GUARDED_BY(monitor_.mu);
  Committer& committer_;
  const Verifier& verifier_;
  const ParameterCache& parameters_;
  RecordMover& mover_;
  // Frames whose write has begun and whose checksums are still to be taken.
  std::vector<uint32_t> unsummed_ ABSL_GUARDED_BY(monitor_.mu);
  bool reads_parameters_ ABSL_GUARDED_BY(monitor_.mu) = false;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_SWAPPER_H_
