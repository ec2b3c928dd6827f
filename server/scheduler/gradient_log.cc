#include "server/scheduler/gradient_log.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/undo.h"
#include "proto/types/layout.h"
#include "storage/persist_in_order.h"

namespace optstate::scheduler {
namespace {

using storage::PersistInOrder;
using storage::PersistPoint;

constexpr auto kRelaxed = std::memory_order_relaxed;

uint64_t Aligned(uint64_t bytes) {
  constexpr uint64_t kAlign = GradientLog::kAlignBytes;
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

// A place for the parameter, which ranks may be reading, and whose newest value
// they have.
struct Scratch {
  alignas(
      GradientLog::kAlignBytes) std::byte bytes[kTileElements * sizeof(float)];
};

// Returns the addresses that an update in host memory has.
kernels::TileView ViewOf(const GradientLog& log, uint64_t tile,
                         const kernels::TileView& host, Scratch* scratch) {
  kernels::TileView view = host;
  std::byte* const kept = log.kept_parameter(tile);
  view.parameter = kept != nullptr ? kept : scratch->bytes;
  if (host.master == host.parameter) view.master = view.parameter;
  return view;
}

// Applies an entry to what is not updated of the record.
void Apply(const GradientLog::Entry& entry, const kernels::UpdateKernel& kernel,
           kernels::TileView view, size_t begin, WorkerUndo* undo,
           std::atomic<uint64_t>* applied) {
  const void* const gradient = entry.gradient();
  view.gradients = absl::MakeConstSpan(&gradient, 1);
  view.begin = begin;
  view.undo = &undo->slot;
  kernel.apply(entry.factors, view);
  undo->End(applied);
}

}  // namespace

uint64_t GradientLog::EntriesBegin(const Room& room) {
  return Aligned(sizeof(Header) + room.tiles * sizeof(Tile));
}

uint64_t GradientLog::ParametersBegin(const Room& room) {
  return EntriesBegin(room) + kSteps * Aligned(room.step_bytes);
}

uint64_t GradientLog::SpareBegin(const Room& room) {
  return ParametersBegin(room) + Aligned(room.parameter_bytes);
}

uint64_t GradientLog::BytesNeeded(const Room& room) {
  return SpareBegin(room) + sizeof(WorkerUndo);
}

bool GradientLog::HasResidents(absl::Span<const std::byte> file) {
  const GradientLog log({const_cast<std::byte*>(file.data()), file.size()});
  if (file.size() < sizeof(Header)) return false;
  const uint64_t most = (file.size() - sizeof(Header)) / sizeof(Tile);
  for (uint64_t tile = 0; tile < log.tiles() && tile < most; ++tile) {
    if (log.is_resident(tile)) return true;
  }
  return false;
}

bool GradientLog::is_empty() const {
  return file_.size() < sizeof(Header) || header()->magic == 0;
}

void GradientLog::Begin(const Room& room, Content content) {
  Clear();
  // A kill leaves some numbers of the room, which fit the file as well: the
  // others are zeros, or this makes all of them zeros.
  Header* const to = header();
  to->room = {room.tiles, Aligned(room.step_bytes),
              Aligned(room.parameter_bytes)};
  to->used = {};
  spare_undo()->Clear();
  to->magic = content == Content::kSum ? kMagicOfSums : kMagic;
  PersistInOrder(PersistPoint::kLogBegunStored);
}

absl::Status GradientLog::Check(uint64_t run_count,
                                absl::Span<const TileBytes> by_run) const {
  const auto damaged = [](const auto&... what) {
    return absl::DataLossError(absl::StrCat("gradient_log: ", what...));
  };
  if (is_empty()) return absl::OkStatus();
  if (!is_made()) return damaged("its first bytes are those of another file");
  const Room& room = header()->room;
  const uint64_t has = file_.size();
  if (room.tiles > has / sizeof(Tile) || room.step_bytes > has ||
      room.parameter_bytes > has || BytesNeeded(room) > has ||
      tiles() > room.tiles) {
    return damaged("it has ", has, " bytes, too few for ", tiles(),
                   " tiles of ", room.tiles, " with ", room.step_bytes,
                   " bytes a step");
  }
  for (uint64_t tile = 0; tile < tiles(); ++tile) {
    const Tile& entry = table()[tile];
    const auto fits = [](uint64_t offset, uint64_t bytes, uint64_t all) {
      return offset % kAlignBytes == 0 && offset <= all &&
             bytes <= all - offset;
    };
    const bool is_whole =
        entry.run < run_count &&
        fits(entry.offset, EntryBytes(by_run[entry.run].gradient),
             room.step_bytes) &&
        (by_run[entry.run].parameter == 0
             ? entry.parameter_offset == kNoParameter
             : fits(entry.parameter_offset, by_run[entry.run].parameter,
                    room.parameter_bytes));
    if (!is_whole) {
      return damaged("tile ", tile, " has run ", entry.run, " of ", run_count,
                     " at byte ", entry.offset, " of ", room.step_bytes);
    }
  }
  return absl::OkStatus();
}

bool GradientLog::HasRoomFor(const TileBytes& bytes) const {
  const Room& room = header()->room;
  const Room& used = header()->used;
  return tiles() < room.tiles &&
         EntryBytes(bytes.gradient) <= room.step_bytes - used.step_bytes &&
         Aligned(bytes.parameter) <=
             room.parameter_bytes - used.parameter_bytes;
}

bool GradientLog::AddTile(uint64_t run, const TileBytes& bytes) {
  if (!HasRoomFor(bytes)) return false;
  Header* const to = header();
  Room& used = to->used;
  const uint64_t parameter_bytes = Aligned(bytes.parameter);
  const uint64_t tile = to->tiles.load(kRelaxed);
  Tile& added = table()[tile];
  added.run = run;
  added.offset = used.step_bytes;
  added.parameter_offset =
      parameter_bytes == 0 ? kNoParameter : used.parameter_bytes;
  added.applied.store(0, kRelaxed);
  added.is_resident.store(0, kRelaxed);
  used.step_bytes += EntryBytes(bytes.gradient);
  used.parameter_bytes += parameter_bytes;
  for (uint64_t k = 0; k < kSteps; ++k) {
    EntryFor(tile, k).step.store(0, kRelaxed);
  }
  PersistInOrder(PersistPoint::kLogTile);
  to->tiles.store(tile + 1, kRelaxed);
  return true;
}

WorkerUndo* GradientLog::spare_undo() const {
  return reinterpret_cast<WorkerUndo*>(file_.data() +
                                       SpareBegin(header()->room));
}

std::byte* GradientLog::kept_parameter(uint64_t tile) const {
  const uint64_t offset = table()[tile].parameter_offset;
  if (offset == kNoParameter) return nullptr;
  return file_.data() + ParametersBegin(header()->room) + offset;
}

void GradientLog::MarkResident(uint64_t tile, uint64_t step,
                               const void* parameter, const TileBytes& bytes) {
  // Former entries are forgotten: stamps may have been later ones.
  for (uint64_t k = 0; k < kSteps; ++k) {
    EntryFor(tile, k).step.store(0, kRelaxed);
  }
  Tile& marked = table()[tile];
  if (bytes.parameter != 0) {
    std::memcpy(kept_parameter(tile), parameter, bytes.parameter);
  }
  marked.applied.store(step, kRelaxed);
  // An entry is stored before anything hangs on the mark.
  PersistInOrder(PersistPoint::kLogResident);
  marked.is_resident.store(1, kRelaxed);
}

void GradientLog::MarkSettled(uint64_t tile) {
  // Replay() ends with a fence of its undo, behind all that it has stored.
  table()[tile].is_resident.store(0, kRelaxed);
  PersistInOrder(PersistPoint::kLogSettledStored);
}

void GradientLog::Clear() {
  PersistInOrder(PersistPoint::kLogCleared);
  header()->tiles.store(0, kRelaxed);
  PersistInOrder(PersistPoint::kLogClearedStored);
}

GradientLog::Entry& GradientLog::EntryFor(uint64_t tile, uint64_t step) const {
  const Room& room = header()->room;
  return *reinterpret_cast<Entry*>(file_.data() + EntriesBegin(room) +
                                   step % kSteps * room.step_bytes +
                                   table()[tile].offset);
}

const GradientLog::Entry* GradientLog::NextEntry(uint64_t tile,
                                                 uint64_t last) const {
  const uint64_t has = applied(tile).load(kRelaxed);
  const Entry* next = nullptr;
  uint64_t next_step = 0;
  for (uint64_t k = 0; k < kSteps; ++k) {
    const Entry& entry = EntryFor(tile, k);
    const uint64_t step = entry.step.load(kRelaxed);
    if (step <= has || step > last || (next != nullptr && step > next_step)) {
      continue;
    }
    next = &entry;
    next_step = step;
  }
  return next;
}

void GradientLog::Write(uint64_t tile, uint64_t step,
                        const kernels::UpdateFactors& factors,
                        absl::FunctionRef<void(std::byte* to)> fill) {
  Entry& entry = EntryFor(tile, step);
  // The entry names a step that the record has, or none, until it names this
  // one: it does not count.
  entry.factors = factors;
  fill(entry.gradient());
  PersistInOrder(PersistPoint::kLogEntry);
  entry.step.store(step, kRelaxed);
  PersistInOrder(PersistPoint::kLogEntryStored);
}

uint64_t Replay(const GradientLog& log, uint64_t tile, uint64_t last,
                const kernels::UpdateKernel& kernel,
                const kernels::TileView& host, WorkerUndo* undo) {
  Scratch scratch;
  const kernels::TileView view = ViewOf(log, tile, host, &scratch);
  std::atomic<uint64_t>& applied = log.applied(tile);
  while (const GradientLog::Entry* entry = log.NextEntry(tile, last)) {
    undo->Begin(UndoKind::kReplay, log.run(tile), entry->step.load(kRelaxed));
    Apply(*entry, kernel, view, /*begin=*/0, undo, &applied);
  }
  return applied.load(kRelaxed);
}

absl::Status FinishReplay(const GradientLog& log, uint64_t tile,
                          const kernels::UpdateKernelKey& key,
                          const kernels::UpdateKernel& kernel,
                          const kernels::TileView& host, WorkerUndo* undo) {
  std::atomic<uint64_t>& applied = log.applied(tile);
  if (applied.load(kRelaxed) == undo->stamp) {
    undo->Clear();
    return absl::OkStatus();
  }
  const GradientLog::Entry& entry = log.EntryFor(tile, undo->stamp);
  if (entry.step.load(kRelaxed) != undo->stamp ||
      applied.load(kRelaxed) > undo->stamp) {
    return absl::DataLossError(
        absl::StrCat("gradient_log: run ", undo->run,
                     " was being brought from step ", applied.load(kRelaxed),
                     " to ", undo->stamp, ", whose gradient is not there"));
  }
  Scratch scratch;
  const kernels::TileView view = ViewOf(log, tile, host, &scratch);
  const absl::StatusOr<size_t> begin =
      kernels::RollBack(view, kernel, key.state, key.master, &undo->slot);
  if (!begin.ok()) return begin.status();
  Apply(entry, kernel, view, *begin, undo, &applied);
  return absl::OkStatus();
}

}  // namespace optstate::scheduler
