#include "storage/record_keeper.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "proto/types/array_format.h"
#include "proto/types/optimizer.h"
#include "proto/types/runs.h"
#include "storage/persist_in_order.h"
#include "storage/state_scales.h"

namespace optstate::storage {
namespace {

// Set in the entry of a run that will not be read in this epoch any more.
constexpr uint64_t kReleased = uint64_t{1} << 63;
// How often a thread looks for its turn before it lets others run.
constexpr int kSpinsMax = 200;

uint64_t RoundUp(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Calls visit(part) for each state array of the layout, and then its scales, in
// the order in which they are kept.
template <typename Visitor>
void ForEachKeptPart(const Layout& layout, const Visitor& visit) {
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout.has_state_array(k)) continue;
    visit(kStatePart0 + k);
    if (HasScales(ArrayFormat(layout, k))) visit(kScalePart0 + k);
  }
}

// Returns how many of a run's elements state array k has: of optimizers with
// arrays for rows and columns, the rest of the parameter's place is never
// touched, and may be a hole.
uint64_t StateElementsOf(const Layout& layout, int k,
                         const RecordKeeper::RunRange& run) {
  if (!layout.optimizer_info().has_prefixes()) return run.numel;
  const uint64_t elements = StateElements(
      layout.optimizer_info(), k, layout.parameters()[run.parameter].shape);
  return std::min(run.numel, elements - std::min(elements, run.begin));
}

// Calls visit(part, bytes) for all that is kept of a run; see
// RecordKeeper::Visitor.
template <typename Visitor>
void ForEachPart(const Layout& layout, const RecordView& record,
                 const RecordKeeper::RunRange& run, const Visitor& visit) {
  record.ForEachMasterPart(
      run.parameter, run.begin, run.numel,
      [&](absl::Span<std::byte> bytes) { visit(kMasterPart, bytes); });
  const auto visit_part = [&](int part, std::byte* data, uint64_t numel) {
    if (data == nullptr) return;
    visit(part, absl::MakeSpan(data, PartBytesOf(layout, part, 0, numel).end));
  };
  for (int k = 0; k < kStateArraysMax; ++k) {
    const uint64_t numel = StateElementsOf(layout, k, run);
    if (numel == 0) continue;
    visit_part(kStatePart0 + k, record.state(k, run.parameter, run.begin),
               numel);
    visit_part(
        kScalePart0 + k,
        reinterpret_cast<std::byte*>(record.scale(k, run.parameter, run.begin)),
        numel);
  }
}

}  // namespace

class RecordKeeper::Turn {
 public:
  explicit Turn(std::atomic<uint8_t>* turn) : turn_(*turn) {
    for (int spins = 0; turn_.exchange(1, std::memory_order_acquire) != 0;) {
      if (++spins > kSpinsMax) std::this_thread::yield();
    }
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() { turn_.store(0, std::memory_order_release); }

 private:
  std::atomic<uint8_t>& turn_;
};

uint64_t RecordKeeper::EntryBytes(const Layout& layout) {
  return RoundUp(layout.run_count() * sizeof(uint64_t), 64);
}

uint64_t RecordKeeper::BytesNeeded(const Layout& layout) {
  uint64_t bytes = EntryBytes(layout) + layout.flat_elements() * sizeof(float);
  ForEachKeptPart(layout, [&](int part) {
    bytes += PartBytesOf(layout, part, 0, layout.flat_elements()).end;
  });
  return bytes;
}

RecordKeeper::RecordKeeper(const Layout* layout, absl::Span<std::byte> memory)
    : layout_(layout),
      memory_(memory),
      turns_(new std::atomic<uint8_t>[layout->run_count()]) {
  for (uint64_t run = 0; run < layout->run_count(); ++run) {
    turns_[run].store(0, std::memory_order_relaxed);
  }
  uint64_t end = EntryBytes(*layout) + layout->flat_elements() * sizeof(float);
  ForEachKeptPart(*layout, [&](int part) {
    part_offsets_[static_cast<size_t>(part)] = end;
    end += PartBytesOf(*layout, part, 0, layout->flat_elements()).end;
  });
}

std::byte* RecordKeeper::KeptMaster(uint64_t flat) const {
  return memory_.data() + EntryBytes(*layout_) + flat * sizeof(float);
}

std::byte* RecordKeeper::KeptState(int part, uint64_t flat) const {
  return memory_.data() + part_offsets_[static_cast<size_t>(part)] +
         PartBytesOf(*layout_, part, flat, 0).begin;
}

void RecordKeeper::Begin(uint64_t epoch) {
  for (uint64_t run = 0; run < layout_->run_count(); ++run) {
    if ((entry(run).load(std::memory_order_relaxed) & ~kReleased) == epoch) {
      entry(run).store(0, std::memory_order_relaxed);
    }
  }
  PersistInOrder(PersistPoint::kKeptEpochBegun);
}

void RecordKeeper::ForgetAll() {
  for (uint64_t run = 0; run < layout_->run_count(); ++run) {
    entry(run).store(0, std::memory_order_relaxed);
  }
}

uint64_t RecordKeeper::BeforeWrite(const RecordView& record, uint64_t epoch,
                                   uint32_t parameter, uint64_t begin,
                                   uint64_t numel) {
  uint64_t kept = 0;
  ForEachRun(*layout_, parameter, begin, begin + numel,
             [&](uint64_t run, uint64_t run_begin, uint64_t run_numel) {
               const Turn turn(&turns_[run]);
               const uint64_t found =
                   entry(run).load(std::memory_order_relaxed);
               if ((found & ~kReleased) == epoch) return;
               Keep(record, {run, parameter, run_begin, run_numel});
               PersistInOrder(PersistPoint::kKeptEntry);
               entry(run).store(epoch, std::memory_order_release);
               PersistInOrder(PersistPoint::kKeptEntryStored);
               ++kept;
             });
  return kept;
}

void RecordKeeper::Keep(const RecordView& record, const RunRange& run) {
  const uint64_t flat = layout_->flat_offset(run.parameter) + run.begin;
  std::byte* masters = KeptMaster(flat);
  ForEachPart(
      *layout_, record, run, [&](int part, absl::Span<const std::byte> bytes) {
        if (part != kMasterPart) {
          std::memcpy(KeptState(part, flat), bytes.data(), bytes.size());
          return;
        }
        std::memcpy(masters, bytes.data(), bytes.size());
        masters += bytes.size();
      });
}

void RecordKeeper::Read(const RecordView& record, uint64_t epoch,
                        const RunRange& run, Visitor visit) const {
  const Turn turn(&turns_[run.run]);
  const bool is_kept = IsKept(run.run, epoch);
  const uint64_t flat = layout_->flat_offset(run.parameter) + run.begin;
  const std::byte* masters = KeptMaster(flat);
  ForEachPart(*layout_, record, run,
              [&](int part, absl::Span<const std::byte> bytes) {
                const std::byte* from = bytes.data();
                if (is_kept && part == kMasterPart) {
                  from = masters;
                  masters += bytes.size();
                } else if (is_kept) {
                  from = KeptState(part, flat);
                }
                visit(part, {from, bytes.size()});
              });
}

void RecordKeeper::Release(uint64_t run, uint64_t epoch) {
  const Turn turn(&turns_[run]);
  entry(run).store(epoch | kReleased, std::memory_order_release);
}

bool RecordKeeper::RollBackRun(const RecordView& record, uint64_t epoch,
                               const RunRange& run,
                               absl::FunctionRef<void()> restored) {
  const Turn turn(&turns_[run.run]);
  if (!IsKept(run.run, epoch)) return false;
  const uint64_t flat = layout_->flat_offset(run.parameter) + run.begin;
  const std::byte* masters = KeptMaster(flat);
  ForEachPart(
      *layout_, record, run, [&](int part, absl::Span<std::byte> bytes) {
        if (part != kMasterPart) {
          std::memcpy(bytes.data(), KeptState(part, flat), bytes.size());
          return;
        }
        std::memcpy(bytes.data(), masters, bytes.size());
        masters += bytes.size();
      });
  restored();
  PersistInOrder(PersistPoint::kKeptEntryCleared);
  entry(run.run).store(0, std::memory_order_release);
  return true;
}

}  // namespace optstate::storage
