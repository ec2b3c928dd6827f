#include "storage/tiers/nvme/record_rewriter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/io/io_engine.h"
#include "storage/tiers/nvme/record_files.h"
#include "storage/tiers/nvme/record_layout.h"
#include "storage/tiers/nvme/run_requests.h"

namespace optstate::nvme {
namespace {

// Records that are copied side by side: enough to keep some disks busy, in a
// bounded memory.
constexpr uint64_t kBatchMax = 8;
constexpr uint64_t kBatchBytesMax = uint64_t{32} << 20;

}  // namespace

RecordRewriter::RecordRewriter(const StoreContext* context,
                               const storage::RewriteTarget* target,
                               storage::DurableCommit durable)
    : context_(*context),
      durable_(std::move(durable)),
      next_(context, target, /*keeps_frames=*/false) {}

absl::Status RecordRewriter::Write(Progress progress) {
  OPTSTATE_RETURN_IF_ERROR(next_.Create());
  absl::Status status = CopyRecords(progress);
  if (status.ok()) status = next_.Seal(durable_);
  next_.Close();
  if (!status.ok()) {
    NextArrangement::Remove(&context_.engine, next_.target().arrangement);
  }
  return status;
}

std::vector<RecordRewriter::Copy> RecordRewriter::Copies() const {
  std::vector<Copy> copies;
  for (uint32_t record = 0; record < context_.records(); ++record) {
    for (uint32_t slot = 0; slot < context_.slots; ++slot) {
      if (next_.Counts(durable_, record, slot))
        copies.push_back({record, slot});
    }
  }
  return copies;
}

absl::Status RecordRewriter::CopyRecords(Progress progress) {
  const uint64_t frame_bytes = std::max(next_.layout().frame_bytes(),
                                        context_.record_layout.frame_bytes());
  const uint64_t count =
      std::clamp(kBatchBytesMax / frame_bytes, uint64_t{1}, kBatchMax);
  std::vector<Buffer> from, to;
  for (uint64_t i = 0; i < 2 * count; ++i) {
    std::vector<Buffer>& buffers = i < count ? from : to;
    buffers.emplace_back(static_cast<std::byte*>(
                             std::aligned_alloc(io::kSectorBytes, frame_bytes)),
                         &std::free);
    if (buffers.back() == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for records of ", frame_bytes, " bytes"));
    }
  }
  const std::vector<Copy> copies = Copies();
  uint64_t bytes_total = 0;
  for (const Copy& copy : copies) {
    bytes_total += next_.WrittenBytes(copy.record);
  }
  progress(0, bytes_total);
  for (size_t i = 0; i < copies.size(); i += count) {
    OPTSTATE_RETURN_IF_ERROR(
        CopyBatch(absl::MakeConstSpan(copies).subspan(i, count), from, to));
    progress(bytes_, bytes_total);
  }
  return absl::OkStatus();
}

absl::Status RecordRewriter::CopyBatch(absl::Span<const Copy> batch,
                                       absl::Span<const Buffer> from,
                                       absl::Span<const Buffer> to) {
  const bool with_parameters = context_.writes_parameters();
  std::vector<io::IoRequest> reads(batch.size()), writes(batch.size());
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto [record, slot] = batch[i];
    const RecordFiles::Place at = context_.files->PlaceOf(record, slot);
    reads[i].kind = io::IoRequest::Kind::kRead;
    reads[i].file = at.file;
    reads[i].offset_bytes = at.offset_bytes;
    reads[i].buffer = {from[i].get(), context_.WrittenBytes(record)};
  }
  OPTSTATE_RETURN_IF_ERROR(
      RunRequests(&context_.engine, absl::MakeSpan(reads)));
  const RecordLayout& layout = next_.layout();
  std::vector<uint32_t> sums(context_.record_layout.record_checksums_max());
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto [record, slot] = batch[i];
    const absl::Span<const uint32_t> checksums = context_.table.checksums(slot);
    const int64_t different = context_.record_layout.FirstDifference(
        record, from[i].get(), with_parameters, checksums);
    if (different >= 0) return context_.DamagedError(record, slot, different);
    layout.CopyFrom(context_.record_layout, record, from[i].get(),
                    with_parameters, to[i].get());
    context_.record_layout.TakeSums(record, checksums, absl::MakeSpan(sums));
    layout.PutSums(record, sums, with_parameters,
                   next_.table().checksums(slot));
    const RecordFiles::Place at = next_.files().PlaceOf(record, slot);
    writes[i].kind = io::IoRequest::Kind::kWrite;
    writes[i].file = at.file;
    writes[i].offset_bytes = at.offset_bytes;
    writes[i].buffer = {to[i].get(), next_.WrittenBytes(record)};
    bytes_ += writes[i].buffer.size();
  }
  return RunRequests(&context_.engine, absl::MakeSpan(writes));
}

}  // namespace optstate::nvme
