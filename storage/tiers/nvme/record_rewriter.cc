#include "storage/tiers/nvme/record_rewriter.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/record_split.h"
#include "storage/swap_sizes.h"

namespace optstate::nvme {
namespace {

// Records that are copied side by side: enough to keep some disks busy, in a
// bounded memory.
constexpr uint64_t kBatchMax = 8;
constexpr uint64_t kBatchBytesMax = uint64_t{32} << 20;

}  // namespace

RecordRewriter::RecordRewriter(StoreContext* context,
                               const storage::RewriteTarget* target,
                               storage::DurableCommit durable,
                               bool keeps_frames)
    : context_(*context),
      target_(*target),
      durable_(std::move(durable)),
      keeps_frames_(keeps_frames),
      sub_groups_(target->layout, target->sub_group_elements,
                  SubGroupTable::CutOf(*target->layout)),
      // Records keep the form that they have.
      layout_(target->layout, &sub_groups_, context->record_layout.section()),
      weights_(target->arrangement.weights.empty()
                   ? std::vector<uint32_t>()
                   : storage::SmallestWeights(target->arrangement.weights)),
      table_(target->table) {}

FrameTable::Shape RecordRewriter::ShapeOf() const {
  FrameTable::Shape shape;
  shape.incarnation = context_.options.incarnation;
  shape.records = sub_groups_.size();
  shape.checksums = layout_.checksum_count();
  // Frames of another size are made when the job has its next layout.
  shape.frames = keeps_frames_ ? context_.frames() : storage::kSwapFramesMin;
  shape.frame_bytes = layout_.frame_bytes();
  shape.slots = context_.slots;
  shape.paths = static_cast<uint32_t>(target_.arrangement.directories.size());
  shape.weights = weights_;
  shape.lacks_sections = layout_.section() == RecordSection::kNone;
  return shape;
}

// Extended layouts append: the records of the job stay what they are.
absl::Status RecordRewriter::CheckLayouts() const {
  if (target_.table.size() < FrameTable::BytesNeeded(ShapeOf())) {
    return absl::InternalError(
        absl::StrCat("the next frame table has ", target_.table.size(),
                     " bytes, it needs ", FrameTable::BytesNeeded(ShapeOf())));
  }
  if (keeps_frames_ &&
      layout_.frame_bytes() != context_.record_layout.frame_bytes()) {
    return absl::InternalError("frames of another size cannot stay");
  }
  for (uint32_t i = 0; i < context_.records(); ++i) {
    const RecordPlace place = context_.table.place(i);
    if (i >= sub_groups_.size() ||
        !layout_.IsSameRecord(context_.record_layout, i)) {
      return absl::InternalError(
          absl::StrCat("record ", i, " is another one in the next layout"));
    }
    if (!keeps_frames_ && place.frame != RecordPlace::kNoFrame &&
        place.is_dirty) {
      return absl::InternalError(
          absl::StrCat("record ", i, " is newer in memory than on disk"));
    }
  }
  return absl::OkStatus();
}

bool RecordRewriter::Counts(uint32_t record, uint32_t slot) const {
  if (durable_.generation != 0 && (durable_.places[record] & 2) != 0 &&
      (durable_.places[record] & 1) == slot) {
    return true;
  }
  const RecordPlace place = context_.table.place(record);
  const bool is_newer = place.frame != RecordPlace::kNoFrame && place.is_dirty;
  return place.is_on_disk && place.slot == slot && !is_newer;
}

absl::Status RecordRewriter::Write(Progress progress) {
  OPTSTATE_RETURN_IF_ERROR(storage::CheckWeights(
      target_.arrangement.weights, target_.arrangement.directories.size()));
  OPTSTATE_RETURN_IF_ERROR(CheckLayouts());
  OPTSTATE_RETURN_IF_ERROR(RecordFiles::Remove(&context_.engine,
                                               target_.arrangement.directories,
                                               target_.arrangement.number));
  absl::Status written = WriteFiles(progress);
  if (!written.ok()) Remove(&context_.engine, target_.arrangement);
  return written;
}

// A file that cannot be removed takes space until records are written anew,
// which removes it first, or the job is deleted.
void RecordRewriter::Remove(io::IoEngine* engine,
                            const storage::Arrangement& arrangement) {
  RecordFiles::Remove(engine, arrangement.directories, arrangement.number)
      .IgnoreError();
  DurableLog::RemoveNext(engine, arrangement.directories[0], arrangement.number)
      .IgnoreError();
}

absl::Status RecordRewriter::WriteFiles(Progress progress) {
  const RecordFiles::Shape shape = {target_.arrangement.directories,
                                    weights_,
                                    static_cast<uint32_t>(sub_groups_.size()),
                                    context_.slots,
                                    target_.arrangement.extents,
                                    target_.arrangement.number};
  OPTSTATE_ASSIGN_OR_RETURN(
      const RecordFiles files,
      RecordFiles::Create(&context_.engine, layout_, shape));
  table_.Make(ShapeOf());
  absl::Status status = CopyRecords(files, progress);
  if (status.ok()) {
    std::vector<io::IoRequest> syncs(files.files().size());
    for (size_t i = 0; i < syncs.size(); ++i) {
      syncs[i].kind = io::IoRequest::Kind::kSync;
      syncs[i].file = files.files()[i];
    }
    status = Run(absl::MakeSpan(syncs));
  }
  files.Close(&context_.engine);
  OPTSTATE_RETURN_IF_ERROR(status);
  SetPlaces();
  return context_.options.is_durable ? WriteLog() : absl::OkStatus();
}

uint64_t RecordRewriter::WrittenBytes(uint32_t record) const {
  return context_.writes_parameters() ? layout_.bytes(record)
                                      : layout_.state_bytes(record);
}

std::vector<RecordRewriter::Copy> RecordRewriter::Copies() const {
  std::vector<Copy> copies;
  for (uint32_t record = 0; record < context_.records(); ++record) {
    for (uint32_t slot = 0; slot < context_.slots; ++slot) {
      if (Counts(record, slot)) copies.push_back({record, slot});
    }
  }
  return copies;
}

absl::Status RecordRewriter::CopyRecords(const RecordFiles& files,
                                         Progress progress) {
  const uint64_t frame_bytes =
      std::max(layout_.frame_bytes(), context_.record_layout.frame_bytes());
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
  for (const Copy& copy : copies) bytes_total += WrittenBytes(copy.record);
  progress(0, bytes_total);
  for (size_t i = 0; i < copies.size(); i += count) {
    OPTSTATE_RETURN_IF_ERROR(CopyBatch(
        absl::MakeConstSpan(copies).subspan(i, count), files, from, to));
    progress(bytes_, bytes_total);
  }
  return absl::OkStatus();
}

absl::Status RecordRewriter::CopyBatch(absl::Span<const Copy> batch,
                                       const RecordFiles& files,
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
  OPTSTATE_RETURN_IF_ERROR(Run(absl::MakeSpan(reads)));
  std::vector<uint32_t> sums(context_.record_layout.record_checksums_max());
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto [record, slot] = batch[i];
    const absl::Span<const uint32_t> checksums = context_.table.checksums(slot);
    const int64_t different = context_.record_layout.FirstDifference(
        record, from[i].get(), with_parameters, checksums);
    if (different >= 0) return context_.DamagedError(record, slot, different);
    layout_.CopyFrom(context_.record_layout, record, from[i].get(),
                     with_parameters, to[i].get());
    context_.record_layout.TakeSums(record, checksums, absl::MakeSpan(sums));
    layout_.PutSums(record, sums, with_parameters, table_.checksums(slot));
    const RecordFiles::Place at = files.PlaceOf(record, slot);
    writes[i].kind = io::IoRequest::Kind::kWrite;
    writes[i].file = at.file;
    writes[i].offset_bytes = at.offset_bytes;
    writes[i].buffer = {to[i].get(), WrittenBytes(record)};
    bytes_ += writes[i].buffer.size();
  }
  return Run(absl::MakeSpan(writes));
}

void RecordRewriter::SetPlaces() {
  for (uint32_t i = 0; i < context_.records(); ++i) {
    const RecordPlace former = context_.table.place(i);
    RecordPlace place;
    place.slot = former.slot;
    place.is_on_disk = former.is_on_disk && Counts(i, former.slot);
    if (keeps_frames_) {
      place.frame = former.frame;
      place.is_dirty = former.is_dirty;
    }
    table_.SetPlace(i, place);
  }
}

absl::Status RecordRewriter::WriteLog() {
  const FrameTable::Shape shape = ShapeOf();
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<DurableLog> log,
      DurableLog::CreateNext(
          &context_.engine, target_.arrangement.directories[0],
          DurableLog::RegionBytes(shape.records, shape.checksums,
                                  DurableLog::RoomFor(target_.job_bytes),
                                  weights_.size()),
          target_.arrangement.number));
  absl::Status status;
  if (durable_.generation != 0) {
    storage::DurableCommit commit = durable_;
    commit.paths = shape.paths;
    commit.weights = weights_;
    commit.job = target_.job;
    commit.places.resize(shape.records, 0);
    commit.checksums.assign(shape.checksums, 0);
    for (uint32_t i = 0; i < context_.records(); ++i) {
      layout_.CopyChecksums(i, table_.checksums(commit.places[i] & 1),
                            absl::MakeSpan(commit.checksums));
    }
    status = log->Put(std::move(commit));
  }
  context_.engine.Close(log->file());
  return status;
}

absl::Status RecordRewriter::Run(absl::Span<io::IoRequest> requests) {
  io::IoEngine& engine = context_.engine;
  for (io::IoRequest& request : requests) engine.Submit(&request);
  std::vector<uint8_t> attempts(requests.size(), 1);
  absl::Status status;
  size_t left = requests.size();
  while (left > 0) {
    io::IoRequest* done = nullptr;
    if (engine.Poll({&done, 1}, /*wait=*/true) == 0) continue;
    const auto i = static_cast<size_t>(done - requests.data());
    if (!done->status.ok() && done->kind == io::IoRequest::Kind::kRead &&
        attempts[i]++ < kNvmeReadAttemptsMax) {
      engine.Submit(done);
      continue;
    }
    status.Update(done->status);
    --left;
  }
  return status;
}

}  // namespace optstate::nvme
