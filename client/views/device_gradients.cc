#include "client/views/device_gradients.h"

#include <atomic>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "proto/types/dtype.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// Kernels load so many bytes at once: an engine takes a gradient that begins
// elsewhere from the gradient area, and says nothing of it.
constexpr uint64_t kAlignBytes = 16;

}  // namespace

DeviceGradients::DeviceGradients(const Layout& layout,
                                 const RankPartition& partition,
                                 uint64_t memory_bytes, uint32_t connection)
    : piece_bytes_(layout.parameters().size(), kNoPiece),
      memory_bytes_(memory_bytes),
      connection_(connection) {
  for (const Piece& piece : partition.pieces) {
    const DType dtype = layout.parameters()[piece.parameter].gradient_dtype;
    piece_bytes_[piece.parameter] = piece.numel * SizeInBytes(dtype);
  }
}

absl::StatusOr<std::unique_ptr<DeviceGradients>> DeviceGradients::Make(
    const Layout& layout, const RankPartition& partition, uint64_t memory_bytes,
    uint32_t connection) {
  auto made = absl::WrapUnique(
      new DeviceGradients(layout, partition, memory_bytes, connection));
  const uint64_t count = layout.parameters().size();
  OPTSTATE_ASSIGN_OR_RETURN(
      made->table_,
      shm::SealedSegment::Create("optstate-device-gradients",
                                 shm::DeviceGradientsBytes(count)));
  auto* const header =
      reinterpret_cast<shm::DeviceGradientsHeader*>(made->table_.data());
  header->magic = shm::kDeviceGradientsMagic;
  header->version = shm::kDeviceGradientsVersion;
  header->segment_bytes = made->table_.size();
  header->parameter_count = count;
  return made;
}

absl::Status DeviceGradients::Clear(absl::Span<const uint32_t> parameters) {
  for (const uint32_t parameter : parameters) {
    if (parameter < piece_bytes_.size()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", parameter, " of ", piece_bytes_.size()));
  }
  // Before the bytes change, which other calls do.
  for (const uint32_t parameter : parameters) {
    entry(parameter).step.store(0, std::memory_order_seq_cst);
  }
  return absl::OkStatus();
}

absl::Status DeviceGradients::Mark(uint64_t step,
                                   absl::Span<const uint32_t> parameters,
                                   absl::Span<const uint64_t> offsets) {
  if (step == 0) return absl::InvalidArgumentError("step 0 has no gradients");
  for (size_t i = 0; i < parameters.size(); ++i) {
    const uint32_t parameter = parameters[i];
    if (parameter >= piece_bytes_.size() ||
        piece_bytes_[parameter] == kNoPiece) {
      return absl::InvalidArgumentError(
          absl::StrCat("this rank has no gradient of parameter ", parameter));
    }
    const uint64_t bytes = piece_bytes_[parameter];
    if (offsets[i] > memory_bytes_ || bytes > memory_bytes_ - offsets[i]) {
      return absl::InvalidArgumentError(
          absl::StrCat("the gradient of parameter ", parameter, " has ", bytes,
                       " bytes at offset ", offsets[i], " of ", memory_bytes_,
                       " bytes of memory of a device"));
    }
    if (offsets[i] % kAlignBytes != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the gradient of parameter ", parameter, " is at offset ", offsets[i],
          " of the memory of a device, which is no multiple of ", kAlignBytes));
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    shm::DeviceGradient& marked = entry(parameters[i]);
    marked.place.store(offsets[i], std::memory_order_relaxed);
    // Release: an engine that sees the step sees the place.
    marked.step.store(step, std::memory_order_release);
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
