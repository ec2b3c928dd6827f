#ifndef OPTSTATE_STORAGE_TESTING_KEPT_JOB_H_
#define OPTSTATE_STORAGE_TESTING_KEPT_JOB_H_

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/array_format.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/runs.h"
#include "storage/record_keeper.h"
#include "storage/tiers/host_store.h"

// A job in memory whose records a RecordKeeper keeps, for its tests.

namespace optstate::storage {

using RunRange = RecordKeeper::RunRange;

// All that outlives the engine of a job: its state, run stamps, a mark as
// step_speculated is one, and the keeper's memory. One block, so that a test
// can take a copy of it at any moment.
class KeptMemory {
 public:
  explicit KeptMemory(const Layout& layout) : layout_(layout) {
    const auto add = [this](uint64_t bytes) {
      const uint64_t at = bytes_;
      bytes_ += (bytes + 63) / 64 * 64;
      return at;
    };
    mark_ = add(sizeof(uint64_t));
    stamps_ = add(layout.run_count() * sizeof(uint64_t));
    kept_ = add(RecordKeeper::BytesNeeded(layout));
    // Behind its entries the rest may be stored in any pieces.
    words_end_ = kept_ + layout.run_count() * sizeof(uint64_t);
    state_ = bytes_;
    parameters_ = add(layout.parameter_area_bytes());
    master_ = add(layout.flat_elements() * sizeof(float));
    for (size_t k = 0; k < kStateArraysMax; ++k) {
      if (!layout.has_state_array(static_cast<int>(k))) continue;
      states_[k] = add(layout.flat_elements() * sizeof(float));
      if (ArrayFormat(layout, static_cast<int>(k)) == StateFormat::kDynamic8) {
        scales_[k] = add(layout.flat_elements() / kQuantizedBlockElements *
                         sizeof(float));
      }
    }
    void* const data = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) std::abort();
    data_ = static_cast<std::byte*>(data);
  }
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory() { ::munmap(data_, bytes_); }

  absl::Span<std::byte> all() const { return {data_, bytes_}; }
  absl::Span<std::byte> kept() const {
    return {data_ + kept_, RecordKeeper::BytesNeeded(layout_)};
  }
  absl::Span<std::byte> state() const {
    return {data_ + state_, bytes_ - state_};
  }
  std::atomic<uint64_t>& mark() const { return Word(mark_); }
  std::atomic<uint64_t>& stamp(uint64_t run) const {
    return Word(stamps_ + run * sizeof(uint64_t));
  }
  // The bytes before this are words, which are stored whole.
  uint64_t words_end() const { return words_end_; }

  StateArrays arrays() const {
    StateArrays arrays;
    arrays.parameters = data_ + parameters_;
    arrays.master = data_ + master_;
    for (size_t k = 0; k < kStateArraysMax; ++k) {
      if (states_[k] != 0) arrays.state[k] = data_ + states_[k];
      if (scales_[k] != 0) {
        arrays.scale[k] = reinterpret_cast<float*>(data_ + scales_[k]);
      }
    }
    return arrays;
  }

 private:
  std::atomic<uint64_t>& Word(uint64_t at) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(data_ + at);
  }

  const Layout& layout_;
  uint64_t bytes_ = 0;
  uint64_t mark_, stamps_, kept_, words_end_, state_, parameters_, master_;
  std::array<uint64_t, kStateArraysMax> states_ = {};
  std::array<uint64_t, kStateArraysMax> scales_ = {};
  std::byte* data_ = nullptr;
};

// A job with random state. Parameters that are not part of their masters follow
// from them, here by a copy of as many of their bytes.
class KeptJob {
 public:
  KeptJob(Layout layout, uint64_t sub_group_elements)
      : layout_(std::move(layout)),
        memory_(layout_),
        store_(&layout_, sub_group_elements, memory_.arrays()) {
    for (uint32_t p = 0; p < layout_.parameters().size(); ++p) {
      const auto numel = static_cast<uint64_t>(layout_.parameters()[p].numel);
      ForEachRun(layout_, p, 0, numel,
                 [&](uint64_t run, uint64_t begin, uint64_t run_numel) {
                   runs_.push_back({run, p, begin, run_numel});
                 });
    }
  }

  const Layout& layout() const { return layout_; }
  KeptMemory& memory() { return memory_; }
  const std::vector<RunRange>& runs() const { return runs_; }
  RecordView RecordOf(const RunRange& run) const {
    return store_.record(store_.sub_groups().IndexOf(run.parameter, run.begin));
  }
  std::unique_ptr<RecordKeeper> MakeKeeper() {
    return std::make_unique<RecordKeeper>(&layout_, memory_.kept());
  }

  // Writes new values to a run, as an update does.
  void Overwrite(const RunRange& run, std::mt19937_64* random) {
    const RecordView record = RecordOf(run);
    const auto fill = [random](absl::Span<std::byte> bytes) {
      for (std::byte& byte : bytes) byte = static_cast<std::byte>((*random)());
    };
    record.ForEachMasterPart(run.parameter, run.begin, run.numel, fill);
    ForEachState(
        run, [&](int /*part*/, absl::Span<std::byte> bytes) { fill(bytes); });
    FollowMasters(run);
  }
  // Puts back all that is kept of the epoch; calls restored(run) for each run.
  template <typename Restored>
  void RollBack(RecordKeeper* keeper, uint64_t epoch,
                const Restored& restored) const {
    for (const RunRange& run : runs_) {
      keeper->RollBackRun(RecordOf(run), epoch, run, [&] { restored(run); });
    }
  }
  // Repairs what the user of a keeper repairs after a rollback.
  void FollowMasters(const RunRange& run) {
    if (layout_.master_format(run.parameter) != MasterFormat::kFloat32) return;
    const RecordView record = RecordOf(run);
    const uint64_t bytes =
        run.numel * SizeInBytes(layout_.parameters()[run.parameter].dtype);
    std::memcpy(record.parameter(run.parameter, run.begin),
                record.master(run.parameter, run.begin), bytes);
  }
  void OverwriteAll(std::mt19937_64* random) {
    for (const RunRange& run : runs_) Overwrite(run, random);
  }
  // Returns the run's values, in the order of RecordKeeper::Visitor.
  std::vector<std::byte> ValuesOf(const RunRange& run) const {
    std::vector<std::byte> values;
    const auto take = [&values](absl::Span<const std::byte> bytes) {
      values.insert(values.end(), bytes.begin(), bytes.end());
    };
    RecordOf(run).ForEachMasterPart(run.parameter, run.begin, run.numel, take);
    ForEachState(
        run, [&](int /*part*/, absl::Span<std::byte> bytes) { take(bytes); });
    return values;
  }
  static std::vector<std::byte> Read(const RecordKeeper& keeper,
                                     const RecordView& record, uint64_t epoch,
                                     const RunRange& run) {
    std::vector<std::byte> values;
    keeper.Read(record, epoch, run,
                [&](int /*part*/, absl::Span<const std::byte> bytes) {
                  values.insert(values.end(), bytes.begin(), bytes.end());
                });
    return values;
  }

 private:
  // The elements that the arrays have of a run: for some optimizers, one for
  // each row or column. A state array comes before its scales.
  template <typename Visitor>
  void ForEachState(const RunRange& run, const Visitor& visit) const {
    const RecordView record = RecordOf(run);
    for (int k = 0; k < kStateArraysMax; ++k) {
      const uint64_t elements =
          StateElements(layout_.optimizer_info(), k,
                        layout_.parameters()[run.parameter].shape);
      const uint64_t end = std::min(run.begin + run.numel, elements);
      if (end <= run.begin ||
          record.state(k, run.parameter, run.begin) == nullptr) {
        continue;
      }
      const auto bytes_of = [&](int part) {
        return PartBytesOf(layout_, part, 0, end - run.begin).end;
      };
      visit(kStatePart0 + k,
            absl::MakeSpan(record.state(k, run.parameter, run.begin),
                           bytes_of(kStatePart0 + k)));
      float* const scale = record.scale(k, run.parameter, run.begin);
      if (scale == nullptr) continue;
      visit(kScalePart0 + k, absl::MakeSpan(reinterpret_cast<std::byte*>(scale),
                                            bytes_of(kScalePart0 + k)));
    }
  }

  const Layout layout_;
  KeptMemory memory_;
  HostStore store_;
  std::vector<RunRange> runs_;
};

struct JobKind {
  OptimizerKind optimizer;
  StateFormat state_format;
  MasterFormat master_format;
};

// Every optimizer with every format of its state and masters.
inline std::vector<JobKind> AllJobKinds() {
  std::vector<JobKind> kinds;
  for (const OptimizerInfo& info : Optimizers()) {
    for (const StateFormat state :
         {StateFormat::kFloat32, StateFormat::kBFloat16,
          StateFormat::kDynamic8}) {
      for (const MasterFormat master :
           {MasterFormat::kFloat32, MasterFormat::kSplit}) {
        kinds.push_back({info.kind, state, master});
      }
    }
  }
  return kinds;
}

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_TESTING_KEPT_JOB_H_
