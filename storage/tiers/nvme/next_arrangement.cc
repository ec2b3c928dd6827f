#include "storage/tiers/nvme/next_arrangement.h"

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "storage/record_split.h"
#include "storage/swap_sizes.h"
#include "storage/tiers/nvme/committer.h"
#include "storage/tiers/nvme/durable_log.h"
#include "storage/tiers/nvme/run_requests.h"

namespace optstate::nvme {

NextArrangement::NextArrangement(const StoreContext* context,
                                 const storage::RewriteTarget* target,
                                 bool keeps_frames)
    : context_(*context),
      target_(*target),
      keeps_frames_(keeps_frames),
      sub_groups_(target->layout, target->sub_group_elements,
                  SubGroupTable::CutOf(*target->layout)),
      // Records keep the form that they have.
      layout_(target->layout, &sub_groups_, context->record_layout.section()),
      weights_(target->arrangement.weights.empty()
                   ? std::vector<uint32_t>()
                   : storage::SmallestWeights(target->arrangement.weights)),
      table_(target->table) {}

FrameTable::Shape NextArrangement::ShapeOf() const {
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
absl::Status NextArrangement::CheckLayouts() const {
  if (target_.table.size() < FrameTable::BytesNeeded(ShapeOf())) {
    return absl::InternalError(
        absl::StrCat("the next frame table has ", target_.table.size(),
                     " bytes, it needs ", FrameTable::BytesNeeded(ShapeOf())));
  }
  if (keeps_frames_ &&
      (layout_.frame_bytes() != context_.record_layout.frame_bytes() ||
       sub_groups_.size() != context_.records())) {
    return absl::InternalError(
        "frames stay as they are only with the same records");
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

absl::Status NextArrangement::Create() {
  const storage::Arrangement& arrangement = target_.arrangement;
  OPTSTATE_RETURN_IF_ERROR(storage::CheckWeights(
      arrangement.weights, arrangement.directories.size()));
  OPTSTATE_RETURN_IF_ERROR(CheckLayouts());
  OPTSTATE_RETURN_IF_ERROR(RecordFiles::Remove(
      &context_.engine, arrangement.directories, arrangement.number));
  const RecordFiles::Shape shape = {arrangement.directories,
                                    weights_,
                                    static_cast<uint32_t>(sub_groups_.size()),
                                    context_.slots,
                                    arrangement.extents,
                                    arrangement.number};
  OPTSTATE_ASSIGN_OR_RETURN(
      RecordFiles files, RecordFiles::Create(&context_.engine, layout_, shape));
  files_ = std::move(files);
  table_.Make(ShapeOf());
  return absl::OkStatus();
}

void NextArrangement::Close() {
  if (!files_.has_value()) return;
  files_->Close(&context_.engine);
  files_.reset();
}

// A file that cannot be removed takes space until records are written anew,
// which removes it first, or the job is deleted.
void NextArrangement::Remove(io::IoEngine* engine,
                             const storage::Arrangement& arrangement) {
  RecordFiles::Remove(engine, arrangement.directories, arrangement.number)
      .IgnoreError();
  DurableLog::RemoveNext(engine, arrangement.directories[0], arrangement.number)
      .IgnoreError();
}

uint64_t NextArrangement::WrittenBytes(uint32_t record) const {
  return context_.writes_parameters() ? layout_.bytes(record)
                                      : layout_.state_bytes(record);
}

bool NextArrangement::Counts(const storage::DurableCommit& durable,
                             uint32_t record, uint32_t slot) const {
  uint32_t durable_slot = Committer::kNoSlot;
  if (durable.generation != 0 && (durable.places[record] & 2) != 0) {
    durable_slot = durable.places[record] & 1;
  }
  return SlotCounts(context_.table.place(record), durable_slot, slot);
}

absl::Status NextArrangement::Seal(const storage::DurableCommit& durable) {
  std::vector<io::IoRequest> syncs(files_->files().size());
  for (size_t i = 0; i < syncs.size(); ++i) {
    syncs[i].kind = io::IoRequest::Kind::kSync;
    syncs[i].file = files_->files()[i];
  }
  OPTSTATE_RETURN_IF_ERROR(
      RunRequests(&context_.engine, absl::MakeSpan(syncs)));
  // Their number may have changed since Create().
  table_.SetFrames(ShapeOf().frames);
  SetPlaces(durable);
  return context_.options.is_durable ? WriteLog(durable) : absl::OkStatus();
}

void NextArrangement::SetPlaces(const storage::DurableCommit& durable) {
  for (uint32_t i = 0; i < context_.records(); ++i) {
    const RecordPlace former = context_.table.place(i);
    RecordPlace place;
    place.slot = former.slot;
    place.is_on_disk = former.is_on_disk && Counts(durable, i, former.slot);
    if (keeps_frames_) {
      place.frame = former.frame;
      place.is_dirty = former.is_dirty;
    }
    table_.SetPlace(i, place);
  }
}

absl::Status NextArrangement::WriteLog(
    const storage::DurableCommit& durable) const {
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
  if (durable.generation != 0) {
    storage::DurableCommit commit = durable;
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

}  // namespace optstate::nvme
