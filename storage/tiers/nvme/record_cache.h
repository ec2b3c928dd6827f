#ifndef OPTSTATE_STORAGE_TIERS_NVME_RECORD_CACHE_H_
#define OPTSTATE_STORAGE_TIERS_NVME_RECORD_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "storage/io/io_engine.h"
#include "storage/state_store.h"
#include "storage/tiers/nvme/frame_list.h"
#include "storage/tiers/nvme/frame_table.h"

namespace optstate::nvme {

// Which record is in which frame, which records are pinned, and which frame is
// given up for another record. Bookkeeping only: no I/O, no bytes of records.
//
// Invariants:
// - A frame is free, or of one record. It is kReady exactly when the place of
//   its record names it; before that the record names it as loaded_frame.
// - A frame is in one list, or in none: that of its kind (List) when its record
//   has no pin, and it is neither being written nor checked.
// - A frame is given up only when its record is on disk as it is in the frame,
//   and the place no longer names it before another record has it.
// - A record with a pin for writing is dirty, and is not being written.
//
// Allocates only in the constructor and in Reset().
//
// Threads: not thread-safe; the store's lock is held.
// Size: one method for each event in the life of a frame. Frames and records
// share the invariants above, so no part of them stands alone.
class RecordCache {
 public:
  static constexpr uint32_t kNoFrame = RecordPlace::kNoFrame;

  // Frames are looked for by what may be done with them, so that no search goes
  // past frames that do not count, of which there may be thousands. "Pending":
  // the pass is still to take the frame's record.
  enum class List : uint8_t {
    kLoaded,  // read, and not checked yet
    kLoadedPending,
    kClean,  // as on disk
    kCleanPending,
    kDirty,  // newer than on disk
    kDirtyPending,
    kFlush,  // newer than on disk, and part of the commit that is being made
    kNone,
  };
  enum class FrameState : uint8_t {
    kFree,
    kReading,
    kLoaded,  // read, or to be zeroed, and not checked yet
    kReady,
  };
  struct Frame {
    FrameState state = FrameState::kFree;
    bool is_writing = false;
    bool is_fresh = false;     // kLoaded: it is to be zeroed, read or not
    bool is_checking = false;  // kLoaded: a thread is at it
    bool is_summing = false;   // kReady: a thread takes checksums
    bool has_sums = false;     // kReady: its checksums are those of its bytes
    List list = List::kNone;   // that the frame is in
    uint8_t attempts = 0;
    uint8_t writes_left = 0;  // is_writing: requests that are not over
    uint32_t slot = 0;        // that is being read or written
    uint32_t record = 0;
    io::IoRequest request;
  };
  struct Record {
    uint32_t pins = 0;
    uint32_t waiters = 0;  // threads that wait to pin it
    // The frame that is being read for it, or has been and is not checked.
    uint32_t loaded_frame = kNoFrame;
    bool is_pending = false;   // in the pass, and not taken yet: SetPending()
    bool is_demanded = false;  // some thread waits for it
    // Part of the commit that is being made: SetMustFlush().
    bool must_flush = false;
    bool is_of_pass = false;  // pinned by the pass, for writing
    // A thread waits for it and gives it new values: it is not to be read.
    bool is_overwritten = false;
    absl::Status error;  // of the last attempt to read it
  };

  // `table` outlives this, and nothing else changes it between Adopt() or
  // Reset() and the next one: the lists would not know.
  RecordCache(uint32_t frames, uint32_t records, FrameTable* table);
  // Takes over what a former engine left in frames.
  void Adopt();
  // Forgets all but the table, which names none but the first `frames` frames,
  // and begins anew with so many. No record is pinned, read or written.
  void Reset(uint32_t frames);

  uint32_t records() const { return static_cast<uint32_t>(records_.size()); }
  Record& record(uint32_t record) { return records_[record]; }
  Frame& frame(uint32_t frame) { return frames_[frame]; }
  RecordPlace place(uint32_t record) const { return table_.place(record); }
  // Says whether the record is in a frame, or one is being read for it.
  bool IsInMemory(uint32_t record) const;
  // Returns the frame that a request is of; kNoFrame: of none.
  uint32_t FrameOf(const io::IoRequest* request) const;

  // Says whether the record, which is in a frame, may be pinned in this way.
  bool MayPin(uint32_t record, storage::StateStore::Access access) const;
  void Pin(uint32_t record, storage::StateStore::Access access,
           bool is_of_pass);
  // Returns whether that was the record's last pin.
  bool Unpin(uint32_t record);
  void SetPending(uint32_t record, bool is_pending);
  void SetMustFlush(uint32_t record, bool must_flush);

  // Returns a frame for another record: a free one, or that of the record which
  // was used longest ago and may be given up. Those that the pass is still to
  // take come last, and only if a thread waits for the other record
  // (`is_demanded`). kNoFrame: there is none.
  uint32_t TakeFrame(bool is_demanded);
  // Assigns what TakeFrame() gave to a record, to be read from its slot, or to
  // be zeroed when there is nothing to read, or it is overwritten.
  void Assign(uint32_t frame, uint32_t record);
  // Notes that the frame has its record's bytes, or is to be zeroed.
  void SetLoaded(uint32_t frame);
  // Gives up a frame whose record could not be read.
  void DropLoaded(uint32_t frame);
  // Begins to check the record that is loaded, which one thread does without
  // the lock, and ends that: the record is in its frame.
  void BeginCheck(uint32_t record);
  void EndCheck(uint32_t record);

  // Says whether the record's frame is newer than the disk, and may be written.
  bool IsWritable(uint32_t record) const;
  void BeginWrite(uint32_t frame, uint32_t slot);
  void EndWrite(uint32_t frame);
  // Notes that the slot has the record as it is in its frame.
  void SetWritten(uint32_t frame);
  // Notes that this slot lost what was written to it. A record that is in a
  // frame as it was written there is newer than on disk from then on, so that
  // it is written anew before its frame is given up, and by the next commit.
  void SetDamaged(uint32_t record, uint32_t slot);

  // Has frames from this one on be given up: their records are to be written,
  // and stay as they are then. kNoFrame: none is.
  void SetVacatedFrom(uint32_t frame) { vacated_from_ = frame; }
  uint32_t vacated_from() const { return vacated_from_; }

  // Returns the number of frames that are being written.
  uint32_t writing() const { return writing_; }
  // Returns the frames of a kind, the one used longest ago first.
  const FrameList& frames(List list) const {
    return lists_[static_cast<size_t>(list)];
  }

 private:
  static constexpr size_t kLists = static_cast<size_t>(List::kNone);

  // Returns the list that a frame belongs to.
  List ListOf(uint32_t frame) const;
  // Puts a frame at the end of its list, unless it belongs to none or is there.
  void Enlist(uint32_t frame);
  void Delist(uint32_t frame);
  void EnlistFrameOf(uint32_t record);

  FrameTable& table_;
  std::vector<Frame> frames_;
  std::vector<Record> records_;
  std::vector<uint32_t> free_;
  std::vector<FrameList> lists_;
  uint32_t writing_ = 0;
  uint32_t vacated_from_ = kNoFrame;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_RECORD_CACHE_H_
