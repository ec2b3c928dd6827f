#include "client/collective/collective_base.h"

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

absl::Status CheckElements(ElementType type, absl::Span<const std::byte> buffer,
                           absl::string_view what) {
  if (!IsValidElementType(static_cast<uint32_t>(type))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "element type ", static_cast<uint32_t>(type), " is not known"));
  }
  const size_t size = SizeInBytes(type);
  if (buffer.size() % size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", buffer.size(), " bytes, which is no whole ",
                     "number of ", Name(type), " elements"));
  }
  if (buffer.data() == nullptr && !buffer.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is null"));
  }
  if (reinterpret_cast<uintptr_t>(buffer.data()) % size != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, " is not aligned to the ", size, " bytes of ", Name(type)));
  }
  return absl::OkStatus();
}

bool AreDisjoint(absl::Span<const std::byte> a, absl::Span<const std::byte> b) {
  if (a.empty() || b.empty()) return true;
  const auto begin_a = reinterpret_cast<uintptr_t>(a.data());
  const auto begin_b = reinterpret_cast<uintptr_t>(b.data());
  return begin_a + a.size() <= begin_b || begin_b + b.size() <= begin_a;
}

absl::Status CheckSums(ElementType type, const SumBuffers& buffers) {
  OPTSTATE_RETURN_IF_ERROR(CheckElements(type, buffers.in, "in"));
  OPTSTATE_RETURN_IF_ERROR(CheckElements(type, buffers.out, "out"));
  if (buffers.in.size() != buffers.out.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("in has ", buffers.in.size(), " bytes, out ",
                     buffers.out.size(), ": they are equally long"));
  }
  if (buffers.in.data() == buffers.out.data() ||
      AreDisjoint(buffers.in, buffers.out)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "in and out overlap: they are the same memory, or disjoint");
}

// Checks that `whole` has a part of the size of `part` for each rank.
absl::Status CheckParts(absl::Span<const std::byte> part,
                        absl::Span<const std::byte> whole, uint32_t rank,
                        uint32_t world_size, absl::string_view part_name,
                        absl::string_view whole_name) {
  if (whole.size() % world_size != 0 ||
      whole.size() / world_size != part.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        whole_name, " has ", whole.size(), " bytes, ", part_name, " ",
        part.size(), ": ", whole_name, " has a part for each of ", world_size,
        " ranks, of the size of ", part_name));
  }
  if (part.empty() || part.data() == whole.data() + rank * part.size() ||
      AreDisjoint(part, whole)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      part_name, " and ", whole_name, " overlap: ", part_name,
      " is this rank's part of ", whole_name, ", or they are disjoint"));
}

}  // namespace

absl::Status CollectiveBase::failure() const {
  absl::MutexLock lock(&failure_mutex_);
  return failure_;
}

absl::Status CollectiveBase::NoteFailure(const absl::Status& status) {
  absl::MutexLock lock(&failure_mutex_);
  if (failure_.ok()) failure_ = status;
  return failure_;
}

void CollectiveBase::LeaveOnce(const absl::Status& why) {
  if (has_left_) return;
  has_left_ = true;
  Leave(why);
}

absl::Status CollectiveBase::Run(absl::FunctionRef<absl::Status()> operation) {
  absl::MutexLock lock(&operation_mutex_);
  OPTSTATE_RETURN_IF_ERROR(failure());
  const absl::Status status = operation();
  if (status.ok()) return status;
  // The error of an operation that Abort() has ended is the abort.
  const absl::Status first = NoteFailure(status);
  LeaveOnce(first);
  return first;
}

void CollectiveBase::Abort(absl::string_view why) {
  const absl::Status first = NoteFailure(
      absl::AbortedError(absl::StrCat("rank ", rank_, " has aborted: ", why)));
  Wake();
  absl::MutexLock lock(&operation_mutex_);
  LeaveOnce(first);
}

absl::Status CollectiveBase::CheckRoot(uint32_t root) const {
  if (root < world_size_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "root ", root, " is not one of the ", world_size_, " ranks"));
}

absl::Status CollectiveBase::CheckReached(absl::Span<const std::byte> a,
                                          absl::Span<const std::byte> b) {
  if (!a.empty()) OPTSTATE_RETURN_IF_ERROR(CheckMemory(a));
  if (!b.empty()) OPTSTATE_RETURN_IF_ERROR(CheckMemory(b));
  return absl::OkStatus();
}

absl::Status CollectiveBase::AllReduce(ElementType type,
                                       absl::Span<const std::byte> in,
                                       absl::Span<std::byte> out) {
  const SumBuffers buffers = {in, out};
  return AllReduceEach(type, absl::MakeConstSpan(&buffers, 1));
}

absl::Status CollectiveBase::AllReduceEach(
    ElementType type, absl::Span<const SumBuffers> buffers) {
  for (const SumBuffers& each : buffers) {
    OPTSTATE_RETURN_IF_ERROR(CheckSums(type, each));
    OPTSTATE_RETURN_IF_ERROR(CheckReached(each.in, each.out));
  }
  if (buffers.empty()) return failure();
  return Run([&] { return RunAllReduce(type, buffers); });
}

absl::Status CollectiveBase::ReduceScatter(ElementType type,
                                           absl::Span<const std::byte> in,
                                           absl::Span<std::byte> out) {
  OPTSTATE_RETURN_IF_ERROR(CheckElements(type, in, "in"));
  OPTSTATE_RETURN_IF_ERROR(CheckElements(type, out, "out"));
  OPTSTATE_RETURN_IF_ERROR(
      CheckParts(out, in, rank_, world_size_, "out", "in"));
  OPTSTATE_RETURN_IF_ERROR(CheckReached(in, out));
  return Run([&] { return RunReduceScatter(type, in, out); });
}

absl::Status CollectiveBase::Reduce(ElementType type, uint32_t root,
                                    absl::Span<const std::byte> in,
                                    absl::Span<std::byte> out) {
  OPTSTATE_RETURN_IF_ERROR(CheckRoot(root));
  if (root == rank_) {
    OPTSTATE_RETURN_IF_ERROR(CheckSums(type, {in, out}));
    OPTSTATE_RETURN_IF_ERROR(CheckReached(in, out));
  } else {
    OPTSTATE_RETURN_IF_ERROR(CheckElements(type, in, "in"));
    OPTSTATE_RETURN_IF_ERROR(CheckReached(in, {}));
  }
  return Run([&] { return RunReduce(type, root, in, out); });
}

absl::Status CollectiveBase::AllGather(absl::Span<const std::byte> in,
                                       absl::Span<std::byte> out) {
  OPTSTATE_RETURN_IF_ERROR(CheckElements(ElementType::kUint8, in, "in"));
  OPTSTATE_RETURN_IF_ERROR(CheckElements(ElementType::kUint8, out, "out"));
  OPTSTATE_RETURN_IF_ERROR(
      CheckParts(in, out, rank_, world_size_, "in", "out"));
  OPTSTATE_RETURN_IF_ERROR(CheckReached(in, out));
  return Run([&] { return RunAllGather(in, out); });
}

absl::Status CollectiveBase::Broadcast(uint32_t root,
                                       absl::Span<std::byte> buffer) {
  OPTSTATE_RETURN_IF_ERROR(CheckRoot(root));
  OPTSTATE_RETURN_IF_ERROR(
      CheckElements(ElementType::kUint8, buffer, "buffer"));
  OPTSTATE_RETURN_IF_ERROR(CheckReached(buffer, {}));
  return Run([&] { return RunBroadcast(root, buffer); });
}

absl::Status CollectiveBase::Barrier() {
  return Run([&] { return RunBarrier(); });
}

}  // namespace optstate::client
