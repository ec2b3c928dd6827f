#ifndef OPTSTATE_SERVER_SCHEDULER_GRADIENT_LOG_H_
#define OPTSTATE_SERVER_SCHEDULER_GRADIENT_LOG_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/worker_undo.h"

namespace optstate::scheduler {

// The gradients of the last steps of tiles whose newest record is on a device:
// what the record in host memory lacks. Any process brings that record up to
// date with the CPU's kernels, whose bits are the device's. It is a view of the
// job's file `gradient_log`, which outlives the process; FORMAT.md has the
// bytes.
//
// A tile has a number, which it keeps, and is one run. For each tile the log
// says up to which step the record in host memory is applied, and has an entry
// for each of the last kSteps steps. An entry is complete when it names a step
// later than that; the run's stamp says whether the step was taken. A parameter
// that is its own master, or half of one, is newer in host memory than the rest
// of its record, so the log has the parameter that goes with that.
//
// Kills: a process may die between any two stores (see WorkerUndo). An entry is
// complete before the device is given the update; a tile is marked as resident
// while its record is up to date. The order of stores has names: see kLogEntry
// and the like (storage/persist_in_order.h).
// Threads: different tiles may be used by many threads at once; Begin(),
// AddTile() and Forget() by one, while no other uses the log.
class GradientLog {
 public:
  // The steps that a record may lag behind. More cost memory, fewer time: a
  // record that is brought up to date is read and written once for all of them.
  static constexpr uint64_t kSteps = 4;
  static constexpr uint64_t kAlignBytes = 64;

  struct TileBytes {
    uint64_t gradient = 0;
    uint64_t parameter = 0;  // 0: it is no part of its master
  };
  // An entry, followed by the gradient.
  struct alignas(kAlignBytes) Entry {
    std::atomic<uint64_t> step;  // up to the tile's applied(): not complete
    uint64_t reserved[7];
    kernels::UpdateFactors factors;

    std::byte* gradient() { return reinterpret_cast<std::byte*>(this + 1); }
    const std::byte* gradient() const {
      return reinterpret_cast<const std::byte*>(this + 1);
    }
  };
  static_assert(sizeof(kernels::UpdateFactors) == 64 && sizeof(Entry) == 128);

  // Returns the bytes of an entry with so many of gradient.
  static uint64_t EntryBytes(uint64_t gradient_bytes) {
    return sizeof(Entry) +
           (gradient_bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  }
  // The room of a log: for so many tiles, whose entries of one step take
  // `step_bytes` together, and their parameters `parameter_bytes`.
  struct Room {
    uint64_t tiles = 0;
    uint64_t step_bytes = 0;
    uint64_t parameter_bytes = 0;  // of those that are parts of their masters
  };
  static uint64_t BytesNeeded(const Room& room);
  // An entry has this for an update.
  enum class Content : uint8_t {
    kGradient,  // the gradient of the one rank that has it, in its dtype
    kSum,       // the sum of those of all ranks, in float
  };
  // Returns whether the file holds what a record lacks.
  static bool HasResidents(absl::Span<const std::byte> file);

  GradientLog() = default;  // of no file
  explicit GradientLog(absl::Span<std::byte> file) : file_(file) {}

  // Makes an empty log in the file, which has BytesNeeded(): of no tile. A log
  // with another room is made one without any first, Begin({}): a kill could
  // leave a mixture of both rooms, for which the file is too small.
  void Begin(const Room& room, Content content = Content::kGradient);
  // Returns whether the file is empty, or of zeros: it was never begun.
  bool is_empty() const;
  Content content() const {
    return is_made() && header()->magic == kMagicOfSums ? Content::kSum
                                                        : Content::kGradient;
  }
  // Returns DATA_LOSS when this is no whole log of the layout. An empty file,
  // or one of zeros, is a log without tiles.
  absl::Status Check(uint64_t run_count,
                     absl::Span<const TileBytes> by_run) const;

  bool HasRoomFor(const TileBytes& bytes) const;
  // Adds a tile, which is not resident; returns false when there is no room.
  bool AddTile(uint64_t run, const TileBytes& bytes);
  uint64_t tiles() const { return is_made() ? header()->tiles.load() : 0; }
  uint64_t run(uint64_t tile) const { return table()[tile].run; }
  // Returns the step up to which the record in host memory is applied, which
  // says nothing of a tile that is not resident.
  std::atomic<uint64_t>& applied(uint64_t tile) const {
    return table()[tile].applied;
  }
  // Says whether the newest record may be elsewhere.
  bool is_resident(uint64_t tile) const {
    return table()[tile].is_resident.load(std::memory_order_relaxed) != 0;
  }
  // Returns a slot that no worker uses while it updates, for a process that
  // finds all of theirs in use.
  WorkerUndo* spare_undo() const;
  // Returns the parameter that goes with the record in host memory; null: the
  // record has all of its master.
  std::byte* kept_parameter(uint64_t tile) const;
  // The record is as new as `step`, the run's stamp; entries are to come. Takes
  // a copy of a parameter that is a part of its master.
  void MarkResident(uint64_t tile, uint64_t step, const void* parameter,
                    const TileBytes& bytes);
  // The record is up to date, and its entries no longer count.
  void MarkSettled(uint64_t tile);

  // Forgets all tiles, whose records are up to date.
  void Clear();

  // Returns the entry for a step, which may be of another one.
  Entry& EntryFor(uint64_t tile, uint64_t step) const;
  // Returns the entry of the first step after applied(tile) and up to `last`;
  // null: there is none.
  const Entry* NextEntry(uint64_t tile, uint64_t last) const;
  // Writes the entry of a step, once the record has the step that it replaces.
  // `fill` stores what it has for the update, as content() says.
  void Write(uint64_t tile, uint64_t step,
             const kernels::UpdateFactors& factors,
             absl::FunctionRef<void(std::byte* to)> fill);

 private:
  struct Header {
    uint64_t magic;
    Room room;
    Room used;
    std::atomic<uint64_t> tiles;
  };
  struct Tile {
    uint64_t run;
    uint64_t offset;            // of its entry among those of a step
    uint64_t parameter_offset;  // kNoParameter: it has none
    std::atomic<uint64_t> applied;
    std::atomic<uint64_t> is_resident;
    uint64_t reserved[3];
  };
  static_assert(sizeof(Header) == 64 && sizeof(Tile) == 64);
  static constexpr uint64_t kNoParameter = ~uint64_t{0};

  static constexpr uint64_t kMagic = 0x31474F4C44415247;        // "GRADLOG1"
  static constexpr uint64_t kMagicOfSums = 0x32474F4C44415247;  // "GRADLOG2"

  bool is_made() const {
    return file_.size() >= sizeof(Header) &&
           (header()->magic == kMagic || header()->magic == kMagicOfSums);
  }
  Header* header() const { return reinterpret_cast<Header*>(file_.data()); }
  Tile* table() const {
    return reinterpret_cast<Tile*>(file_.data() + sizeof(Header));
  }
  // Returns the first bytes of the entries, the masters and the spare slot.
  static uint64_t EntriesBegin(const Room& room);
  static uint64_t ParametersBegin(const Room& room);
  static uint64_t SpareBegin(const Room& room);

  absl::Span<std::byte> file_;
};

// Brings the record of a tile up to `last`: applies what it lacks of the log.
// `host` has the record's addresses, and the same one twice where a parameter
// is its own master; parameter, gradients, undo and begin do not count. Returns
// the step that the record has then.
//
// Threads: thread-safe for different tiles and slots.
uint64_t Replay(const GradientLog& log, uint64_t tile, uint64_t last,
                const kernels::UpdateKernel& kernel,
                const kernels::TileView& host, WorkerUndo* undo);

// Finishes what a process was killed in the middle of in Replay(); the slot
// names the run of the tile. DATA_LOSS: the slot, or the log, is impossible.
absl::Status FinishReplay(const GradientLog& log, uint64_t tile,
                          const kernels::UpdateKernelKey& key,
                          const kernels::UpdateKernel& kernel,
                          const kernels::TileView& host, WorkerUndo* undo);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_GRADIENT_LOG_H_
