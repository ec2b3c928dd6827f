#include "server/scheduler/state_placement.h"

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/workers/numa_memory.h"
#include "storage/record_view.h"

namespace optstate::scheduler {
namespace {

constexpr int kParameterPart = storage::kRecordPartCount;
constexpr int kSumPart = kParameterPart + 1;
constexpr std::ptrdiff_t kGapBytesMax = 64 << 10;

// Moves the arrays of consecutive records together: they are adjacent as a
// rule.
class NodeMover {
 public:
  NodeMover(const StepPlan& plan, storage::StateStore* store, int node)
      : plan_(plan), store_(*store), node_(node) {}

  void AddRecord(const storage::RecordView& record) {
    for (int part = storage::kStatePart0; part < storage::kRecordPartCount;
         ++part) {
      if (!MayHaveHoles(part)) Add(part, record.part(part));
    }
    plan_.ForEachParameterIn(record.sub_group(),
                             [&](uint32_t p, uint64_t begin, uint64_t end) {
                               AddParameter(record, p, begin, end - begin);
                             });
  }
  absl::Status Finish() {
    for (absl::Span<std::byte>& span : open_) Move(&span);
    return status_;
  }

 private:
  // An array that belongs to an option has memory only for groups with the
  // option.
  bool MayHaveHoles(int part) const {
    const OptimizerInfo& info = plan_.layout().optimizer_info();
    if (info.has_prefixes()) return true;
    const auto index =
        static_cast<size_t>((part - storage::kStatePart0) % kStateArraysMax);
    return info.state_arrays[index].option != 0;
  }

  void AddParameter(const storage::RecordView& record, uint32_t p,
                    uint64_t begin, uint64_t numel) {
    const DType dtype = plan_.layout().parameters()[p].dtype;
    Add(kParameterPart,
        {record.parameter(p, begin), numel * SizeInBytes(dtype)});
    const uint64_t beside = SizeInBytes(plan_.layout().master_format(p));
    if (beside != 0)
      Add(storage::kMasterPart, {record.master(p, begin), numel * beside});
    if (!plan_.accumulates()) return;
    Add(kSumPart,
        {store_.sums(p, begin), numel * SizeInBytes(plan_.sum_dtype(p))});
  }

  void Add(int part, absl::Span<std::byte> span) {
    if (span.empty()) return;
    absl::Span<std::byte>& before = open_[static_cast<size_t>(part)];
    const std::ptrdiff_t gap =
        before.empty() ? -1 : span.data() - (before.data() + before.size());
    if (gap < 0 || gap > kGapBytesMax) {
      Move(&before);
      before = span;
    } else {
      before = {before.data(),
                static_cast<size_t>(span.data() + span.size() - before.data())};
    }
  }

  void Move(absl::Span<std::byte>* span) {
    if (!span->empty()) status_.Update(MoveToNode(*span, node_));
    *span = {};
  }

  const StepPlan& plan_;
  storage::StateStore& store_;
  const int node_;
  std::array<absl::Span<std::byte>, kSumPart + 1> open_;
  absl::Status status_;
};

absl::Status MoveShare(const StepPlan& plan, storage::StateStore* store,
                       const NodeShare& share) {
  NodeMover mover(plan, store, share.node);
  for (size_t i = share.begin; i < share.end; ++i) {
    const auto pin = store->PinSubGroup(i, storage::StateStore::Access::kWrite);
    OPTSTATE_RETURN_IF_ERROR(pin.status());
    mover.AddRecord(pin->record());
  }
  return mover.Finish();
}

}  // namespace

absl::Status MoveStateToNodes(const StepPlan& plan, storage::StateStore* store,
                              const WorkerPlacement& placement) {
  absl::Status status;
  if (!placement.several_nodes() || !store->is_resident()) return status;
  for (const NodeShare& share :
       NodeShares(placement, store->sub_groups().size())) {
    status.Update(MoveShare(plan, store, share));
  }
  return status;
}

}  // namespace optstate::scheduler
