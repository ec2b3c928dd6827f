// Opening, pins and passes: what the users of the store call.

#include "storage/tiers/nvme/nvme_store.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

// Returns the room for a job's text, which may grow a little: its description
// is written anew when ranks change its settings.
uint64_t RoomFor(uint64_t job_bytes) { return job_bytes + (64 << 10); }

// Opens the commits of a job that has records.
absl::StatusOr<std::unique_ptr<DurableLog>> OpenLog(
    io::IoEngine* engine, const std::string& directory) {
  absl::StatusOr<std::unique_ptr<DurableLog>> log =
      DurableLog::Open(engine, directory);
  if (!absl::IsNotFound(log.status())) return log;
  return absl::DataLossError(
      absl::StrCat(directory, "/commits is missing: ", log.status().message(),
                   ". Is its disk mounted?"));
}

}  // namespace

NvmeStore::Sizes NvmeStore::SizesOf(const Layout& layout,
                                    uint64_t sub_group_elements,
                                    const SizeOptions& options) {
  const SubGroupTable sub_groups(&layout, sub_group_elements,
                                 SubGroupTable::CutOf(layout));
  const RecordLayout records(&layout, &sub_groups);
  FrameTable::Shape shape;
  shape.records = sub_groups.size();
  shape.checksums = records.checksum_count();
  shape.slots = options.is_durable ? 2 : 1;
  Sizes sizes;
  sizes.frame = records.frame_bytes();
  sizes.records = shape.records;
  sizes.table = FrameTable::BytesNeeded(shape);
  sizes.disk = RecordFiles::BytesNeeded(
                   records, static_cast<uint32_t>(shape.records), shape.slots) +
               options.directories * io::kSectorBytes;
  if (options.is_durable) {
    sizes.disk += io::kSectorBytes +
                  2 * DurableLog::RegionBytes(shape.records, shape.checksums,
                                              RoomFor(options.job_bytes));
  }
  return sizes;
}

NvmeStore::NvmeStore(const Layout* layout, uint64_t sub_group_elements,
                     const StateArrays& arrays, Options options)
    : StateStore(layout, sub_group_elements, arrays),
      options_(std::move(options)),
      engine_(std::move(options_.engine)),
      record_layout_(layout, &sub_groups()),
      slots_(options_.is_durable ? 2 : 1),
      table_(options_.table),
      frames_(options_.frames.size() / record_layout_.frame_bytes()),
      records_(sub_groups().size()),
      unpinned_(static_cast<uint32_t>(frames_.size())),
      loaded_(static_cast<uint32_t>(frames_.size())),
      durable_slots_(sub_groups().size(), kNoSlot),
      syncs_(options_.directories.size()) {
  const size_t records = records_.size();
  free_.reserve(frames_.size());
  demanded_.reserve(records);
  pass_.reserve(records);
  commit_.places.reserve(records);
  commit_.checksums.reserve(record_layout_.checksum_count());
}

FrameTable::Shape NvmeStore::ShapeOf() const {
  FrameTable::Shape shape;
  shape.incarnation = options_.incarnation;
  shape.records = sub_groups().size();
  shape.checksums = record_layout_.checksum_count();
  shape.frames = options_.frames.size() / record_layout_.frame_bytes();
  shape.frame_bytes = record_layout_.frame_bytes();
  shape.slots = slots_;
  shape.paths = static_cast<uint32_t>(options_.directories.size());
  return shape;
}

absl::StatusOr<std::unique_ptr<NvmeStore>> NvmeStore::Open(
    const Layout* layout, uint64_t sub_group_elements,
    const StateArrays& arrays, Options options) {
  const DurableCommit* const restored =
      std::exchange(options.restored, nullptr);
  std::unique_ptr<NvmeStore> store(
      new NvmeStore(layout, sub_group_elements, arrays, std::move(options)));
  const FrameTable::Shape shape = store->ShapeOf();
  if (shape.frames < kFramesMin) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a host budget of ", store->options_.frames.size(),
        " bytes has room for ", shape.frames, " records of ", shape.frame_bytes,
        " bytes; it must hold ", kFramesMin, ": raise host_budget to ",
        kFramesMin * shape.frame_bytes, " or make sub_group_size smaller"));
  }
  const bool is_made = FrameTable::IsMade(store->options_.table);
  if (is_made) OPTSTATE_RETURN_IF_ERROR(store->table_.Check(shape));
  store->engine_->RegisterMemory(store->options_.frames);
  OPTSTATE_RETURN_IF_ERROR(
      store->OpenFiles(!is_made && restored == nullptr, restored));
  if (!is_made) {
    store->table_.Make(shape);
    for (uint32_t i = 0; restored != nullptr && i < shape.records; ++i) {
      RecordPlace place;
      place.slot = restored->places[i] & 1;
      place.is_on_disk = (restored->places[i] & 2) != 0;
      const auto from = absl::MakeConstSpan(restored->checksums);
      const absl::Span<uint32_t> to = store->table_.checksums(place.slot);
      store->record_layout_.CopyChecksums(i, from, to);
      store->table_.SetPlace(i, place);
    }
  }
  store->table_.SetFrames(shape.frames);
  store->Adopt();
  OPTSTATE_RETURN_IF_ERROR(store->RewriteUnsynced());
  store->thread_ = std::thread([raw = store.get()] { raw->Run(); });
  return store;
}

absl::Status NvmeStore::OpenFiles(bool is_new, const DurableCommit* restored) {
  const auto records = static_cast<uint32_t>(sub_groups().size());
  const absl::Span<const std::string> directories = options_.directories;
  const FrameTable::Shape shape = ShapeOf();
  if (is_new) {
    OPTSTATE_RETURN_IF_ERROR(DurableLog::Remove(engine_.get(), directories[0]));
    OPTSTATE_RETURN_IF_ERROR(RecordFiles::Remove(engine_.get(), directories));
  }
  if (restored != nullptr &&
      (restored->slots != slots_ || restored->paths != shape.paths ||
       restored->places.size() != shape.records ||
       restored->checksums.size() != shape.checksums)) {
    return absl::DataLossError(absl::StrCat(
        directories[0], "/commits is of ", restored->places.size(),
        " records with ", restored->checksums.size(), " checksums over ",
        restored->paths, " directories, the job has ", shape.records, ", ",
        shape.checksums, " and ", shape.paths));
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      RecordFiles files,
      is_new ? RecordFiles::Create(engine_.get(), directories, record_layout_,
                                   records, slots_)
             : RecordFiles::Open(engine_.get(), directories, record_layout_,
                                 records, slots_));
  files_.push_back(std::move(files));
  if (!options_.is_durable) return absl::OkStatus();
  const uint64_t region_bytes = DurableLog::RegionBytes(
      shape.records, shape.checksums, RoomFor(options_.job_bytes));
  auto log =
      is_new ? DurableLog::Create(engine_.get(), directories[0], region_bytes)
             : OpenLog(engine_.get(), directories[0]);
  if (!log.ok()) {
    if (is_new) {
      for (const io::FileId file : files_[0].files()) engine_->Close(file);
      RecordFiles::Remove(engine_.get(), directories).IgnoreError();
    }
    return log.status();
  }
  log_ = *std::move(log);
  return log_->Settle();
}

// Takes over what a former engine left in frames, and the last commit.
void NvmeStore::Adopt() {
  const absl::MutexLock lock(&mu_);
  for (uint32_t i = 0; i < records_.size(); ++i) {
    const RecordPlace place = table_.place(i);
    if (place.frame == RecordPlace::kNoFrame) continue;
    Frame& frame = frames_[place.frame];
    frame.state = FrameState::kReady;
    frame.record = i;
    frame.slot = place.slot;
    unpinned_.PushBack(place.frame);
  }
  for (auto i = static_cast<uint32_t>(frames_.size()); i > 0; --i) {
    if (frames_[i - 1].state == FrameState::kFree) free_.push_back(i - 1);
  }
  if (log_ == nullptr) return;
  const DurableCommit& last = log_->last();
  commit_.generation = last.generation;
  if (last.incarnation != options_.incarnation ||
      last.places.size() != records_.size()) {
    return;  // no commit of this job yet
  }
  durable_step_ = last.step;
  for (size_t i = 0; i < records_.size(); ++i) {
    if ((last.places[i] & 2) != 0) durable_slots_[i] = last.places[i] & 1;
  }
}

// After a sync that failed, or of which the engine before did not see the end,
// what was written since the last commit may be in a cache only, of which no
// later sync knows. It is written again, so that the
// next sync makes it durable: what is in a frame when that is flushed, the rest
// now.
absl::Status NvmeStore::RewriteUnsynced() {
  if (!options_.is_durable || !table_.is_syncing()) return absl::OkStatus();
  const std::unique_ptr<std::byte, decltype(&std::free)> buffer(
      static_cast<std::byte*>(
          std::aligned_alloc(io::kSectorBytes, record_layout_.frame_bytes())),
      &std::free);
  const absl::MutexLock lock(&mu_);
  for (uint32_t i = 0; i < records_.size(); ++i) {
    RecordPlace place = table_.place(i);
    if (!place.is_on_disk || place.slot == durable_slots_[i]) continue;
    if (place.frame != RecordPlace::kNoFrame) {
      place.is_dirty = true;
      table_.SetPlace(i, place);
      continue;
    }
    const RecordFiles::Place at = files_[0].PlaceOf(i, place.slot);
    for (const auto kind :
         {io::IoRequest::Kind::kRead, io::IoRequest::Kind::kWrite}) {
      io::IoRequest request;
      request.kind = kind;
      request.file = at.file;
      request.offset_bytes = at.offset_bytes;
      request.buffer = {buffer.get(), record_layout_.bytes(i)};
      engine_->Submit(&request);
      io::IoRequest* done = nullptr;
      while (engine_->Poll({&done, 1}, /*wait=*/true) == 0) {
      }
      OPTSTATE_RETURN_IF_ERROR(request.status);
      const int64_t different = record_layout_.FirstDifference(
          i, buffer.get(), /*with_parameters=*/true,
          table_.checksums(place.slot));
      if (different >= 0) return Damaged(i, place.slot, different);
    }
  }
  table_.SetSyncing(false);
  return absl::OkStatus();
}

absl::StatusOr<DurableCommit> NvmeStore::ReadCommit(
    io::IoEngine* engine, absl::Span<const std::string> directories) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<DurableLog> log,
                            DurableLog::Open(engine, directories[0]));
  if (log->last().generation != 0) {
    engine->Close(log->file());
    return log->last();
  }
  engine->Close(log->file());
  if (!log->is_first_torn()) OPTSTATE_RETURN_IF_ERROR(log->damage());
  return absl::NotFoundError(
      absl::StrCat(directories[0], ": the job was never durable"));
}

NvmeStore::~NvmeStore() {
  {
    const absl::MutexLock lock(&mu_);
    stop_ = true;
    Wake();
  }
  if (thread_.joinable()) thread_.join();
}

RecordView NvmeStore::ViewOf(uint32_t record, uint32_t frame) {
  return record_layout_.ViewOf(record, FrameAt(frame), arrays().parameters);
}

absl::StatusOr<StateStore::Pin> NvmeStore::PinSubGroup(size_t sub_group,
                                                       Access access) {
  return Take(static_cast<uint32_t>(sub_group), access);
}

// Waits until the record is in a frame and may be used in this way.
absl::StatusOr<StateStore::Pin> NvmeStore::Take(uint32_t index, Access access) {
  const absl::MutexLock lock(&mu_);
  Record& record = records_[index];
  while (true) {
    OPTSTATE_RETURN_IF_ERROR(failed_);
    RecordPlace place = table_.place(index);
    if (place.frame != RecordPlace::kNoFrame) {
      const Frame& frame = frames_[place.frame];
      const bool may_use =
          access == Access::kRead || (!frame.is_writing && !record.must_flush);
      if (may_use) {
        if (access == Access::kWrite && !place.is_dirty) {
          place.is_dirty = true;
          table_.SetPlace(index, place);
        }
        ++record.pins;
        record.is_pending = false;
        unpinned_.Remove(place.frame);
        return Pin(ViewOf(index, place.frame), this, access);
      }
    } else if (record.loaded_frame != RecordPlace::kNoFrame) {
      Frame& frame = frames_[record.loaded_frame];
      if (frame.state == FrameState::kLoaded && !frame.is_checking) {
        OPTSTATE_RETURN_IF_ERROR(Check(index));
        continue;
      }
    } else if (!record.error.ok()) {
      return std::exchange(record.error, absl::OkStatus());
    } else if (!record.is_demanded) {
      record.is_demanded = true;
      demanded_.push_back(index);
      Wake();
    }
    ++record.waiters;
    changed_.Wait(&mu_);
    --record.waiters;
  }
}

// Compares what was read with its checksums, or makes the zeros of a record
// that was never written, without the lock; then the record is in its frame.
absl::Status NvmeStore::Check(uint32_t index) {
  Record& record = records_[index];
  const uint32_t frame_index = record.loaded_frame;
  Frame& frame = frames_[frame_index];
  frame.is_checking = true;
  loaded_.Remove(frame_index);
  RecordPlace place = table_.place(index);
  const uint32_t slot = place.slot;
  const bool is_fresh = frame.is_fresh;
  const bool with_parameters = reads_parameters_;
  mu_.Unlock();
  int64_t different = -1;
  if (is_fresh) {
    std::memset(FrameAt(frame_index), 0, record_layout_.bytes(index));
  } else {
    different = record_layout_.FirstDifference(
        index, FrameAt(frame_index), with_parameters, table_.checksums(slot));
  }
  if (different < 0 && with_parameters) {
    record_layout_.PutParameters(index, FrameAt(frame_index),
                                 arrays().parameters);
  }
  mu_.Lock();
  frame.is_checking = false;
  record.loaded_frame = RecordPlace::kNoFrame;
  changed_.SignalAll();
  if (different >= 0) {
    ReleaseFrame(frame_index);
    Wake();
    return Damaged(index, slot, different);
  }
  frame.state = FrameState::kReady;
  place.frame = frame_index;
  place.is_dirty = is_fresh;
  table_.SetPlace(index, place);
  unpinned_.PushBack(frame_index);
  return absl::OkStatus();
}

absl::Status NvmeStore::Damaged(uint32_t record, uint32_t slot,
                                int64_t tile) const {
  const RecordFiles::Place at = files_[0].PlaceOf(record, slot);
  const SubGroup& range = sub_groups()[record];
  const auto tiles = static_cast<int64_t>(
      (range.elements() + kTileElements - 1) / kTileElements);
  return absl::DataLossError(absl::StrCat(
      options_.directories[record % options_.directories.size()],
      "/records: the record at byte ", at.offset_bytes, " (",
      record_layout_.bytes(record), " bytes, ",
      tile < tiles ? absl::StrCat("tile ", tile) : "its parameters",
      ", of parameters \"", layout().parameters()[range.first_parameter].name,
      "\" to \"", layout().parameters()[range.end_parameter - 1].name,
      "\") is not what was written: its checksum differs. The disk, or "
      "something that wrote to the file, has damaged it; load the job anew "
      "from a checkpoint"));
}

void NvmeStore::Unpin(const RecordView& view, Access /*access*/) {
  const auto index =
      static_cast<uint32_t>(&view.sub_group() - sub_groups().all().data());
  const absl::MutexLock lock(&mu_);
  Record& record = records_[index];
  if (--record.pins > 0) return;
  unpinned_.PushBack(table_.place(index).frame);
  Wake();
}

absl::StatusOr<size_t> NvmeStore::BeginPass(absl::Span<const uint8_t> wanted) {
  const absl::MutexLock lock(&mu_);
  OPTSTATE_RETURN_IF_ERROR(failed_);
  pass_.clear();
  for (Record& record : records_) {
    record.is_pending = false;
    record.error = absl::OkStatus();
  }
  for (const bool in_frame : {true, false}) {
    for (uint32_t i = 0; i < records_.size(); ++i) {
      if (wanted[i] == 0) continue;
      const bool is_in_frame =
          table_.place(i).frame != RecordPlace::kNoFrame ||
          records_[i].loaded_frame != RecordPlace::kNoFrame;
      if (is_in_frame != in_frame) continue;
      records_[i].is_pending = true;
      pass_.push_back(i);
    }
  }
  read_ahead_ = 0;
  Wake();
  return pass_.size();
}

absl::StatusOr<StateStore::Pin> NvmeStore::PinOfPass(size_t position) {
  uint32_t record;
  {
    const absl::MutexLock lock(&mu_);
    record = pass_[position];
  }
  return Take(record, Access::kWrite);
}

absl::Status NvmeStore::RestoreParameters() {
  {
    const absl::MutexLock lock(&mu_);
    reads_parameters_ = true;
  }
  // A pass, so that the next records are read meanwhile.
  const std::vector<uint8_t> all(records_.size(), 1);
  absl::Status status = BeginPass(all).status();
  for (uint32_t i = 0; i < records_.size() && status.ok(); ++i) {
    status = Take(i, Access::kRead).status();
  }
  const absl::MutexLock lock(&mu_);
  reads_parameters_ = false;
  return status;
}

NvmeStore::Counters NvmeStore::counters() const {
  const absl::MutexLock lock(&mu_);
  return counters_;
}

uint64_t NvmeStore::durable_step() const {
  const absl::MutexLock lock(&mu_);
  return durable_step_;
}

}  // namespace optstate
