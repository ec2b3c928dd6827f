#include "storage/state_store.h"

#include <cstring>

#include "proto/types/accumulation.h"

namespace optstate::storage {
namespace {

absl::Status NothingToRewrite() {
  return absl::FailedPreconditionError(
      "the job lies in memory whole: it has no records on disk to write anew");
}

}  // namespace

StateStore::StateStore(const Layout* layout, uint64_t sub_group_elements,
                       const StateMemory& memory)
    : layout_(layout),
      sub_groups_(layout, sub_group_elements, SubGroupTable::CutOf(*layout)),
      arrays_(memory.arrays_) {
  if (arrays_.gradient_accumulator != nullptr) {
    gradient_sum_offsets_ = GradientSumOffsets(*layout);
  }
}

absl::StatusOr<StateStore::Pin> StateStore::PinSubGroup(size_t sub_group,
                                                        Access access) {
  const bool is_written = access != Access::kRead;
  if (lag_ == nullptr || !lag_->Concerns(sub_groups_[sub_group], is_written)) {
    return PinRecord(sub_group, access);
  }
  // To bring it up to date is to write it.
  OPTSTATE_ASSIGN_OR_RETURN(
      Pin pin, PinRecord(sub_group, is_written ? access : Access::kWrite));
  lag_->MakeCurrent(pin.record(), is_written);
  return pin;
}

std::byte* StateStore::sums(uint32_t parameter, uint64_t begin) const {
  if (arrays_.accumulator != nullptr) {
    return reinterpret_cast<std::byte*>(
        arrays_.accumulator + layout_->flat_offset(parameter) + begin);
  }
  if (arrays_.gradient_accumulator == nullptr) return nullptr;
  return arrays_.gradient_accumulator + gradient_sum_offsets_[parameter] +
         begin * SizeInBytes(layout_->parameters()[parameter].gradient_dtype);
}

absl::Status StateStore::RequestCommit(uint64_t /*step*/,
                                       absl::string_view /*job*/) {
  return absl::FailedPreconditionError(
      "the job is not durable: it was made with durability \"none\"");
}

absl::Status StateStore::ReadParameter(uint32_t parameter, uint64_t begin,
                                       uint64_t numel, std::byte* out) {
  if (numel == 0) return absl::OkStatus();
  const uint64_t bytes = SizeInBytes(layout_->parameters()[parameter].dtype);
  std::memcpy(out,
              arrays_.parameters + layout_->parameter_offset_bytes(parameter) +
                  begin * bytes,
              numel * bytes);
  return absl::OkStatus();
}

absl::Status StateStore::ChangeFrames(
    uint32_t /*frames*/,
    absl::FunctionRef<absl::Status(absl::Span<std::byte>*)> /*resize*/) {
  return absl::FailedPreconditionError(
      "the job lies in memory whole: it has no frames");
}

absl::Status StateStore::BeginMove(const RewriteTarget& /*target*/) {
  return NothingToRewrite();
}

absl::Status StateStore::CopyRecords() { return NothingToRewrite(); }

absl::StatusOr<uint64_t> StateStore::FinishMove(
    absl::FunctionRef<absl::Status()> /*commit*/) {
  return NothingToRewrite();
}

absl::StatusOr<uint64_t> StateStore::WriteAnew(
    const RewriteTarget& /*target*/) {
  return NothingToRewrite();
}

absl::StatusOr<VerifyResult> StateStore::Verify(
    absl::FunctionRef<bool(const VerifyResult&)> /*progress*/) {
  return absl::FailedPreconditionError(
      "the job lies in memory alone: there is nothing on disk to verify");
}

void StateStore::Unpin(const RecordView& /*record*/, Access /*access*/) {}

}  // namespace optstate::storage
