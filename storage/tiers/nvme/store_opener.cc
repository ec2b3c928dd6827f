#include "storage/tiers/nvme/store_opener.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "proto/types/sub_groups.h"
#include "storage/io/io_engine.h"
#include "storage/record_split.h"
#include "storage/swap_sizes.h"
#include "storage/tiers/nvme/record_files.h"
#include "storage/tiers/nvme/record_layout.h"

namespace optstate::nvme {
namespace {

// Opens the commits of a job that has records.
absl::StatusOr<std::unique_ptr<DurableLog>> OpenExistingLog(
    io::IoEngine* engine, const std::string& directory) {
  absl::StatusOr<std::unique_ptr<DurableLog>> log =
      DurableLog::Open(engine, directory);
  if (!absl::IsNotFound(log.status())) return log;
  return absl::DataLossError(
      absl::StrCat(directory, "/commits is missing: ", log.status().message(),
                   ". Is its disk mounted?"));
}

}  // namespace

storage::SwapSizes StoreOpener::SizesOf(const Layout& layout,
                                        uint64_t sub_group_elements,
                                        const NvmeSizeOptions& options) {
  const SubGroupTable sub_groups(&layout, sub_group_elements,
                                 SubGroupTable::CutOf(layout));
  const RecordLayout records(
      &layout, &sub_groups,
      SectionOf(options.is_durable, options.holds_parameters,
                options.has_sections));
  FrameTable::Shape shape;
  shape.records = sub_groups.size();
  shape.checksums = records.checksum_count();
  shape.slots = options.is_durable ? 2 : 1;
  shape.weights = storage::SmallestWeights(options.weights);
  storage::SwapSizes sizes;
  sizes.frame = records.frame_bytes();
  sizes.section = records.section_bytes_max();
  sizes.records = shape.records;
  sizes.table = FrameTable::BytesNeeded(shape);
  if (options.directories == 0) return sizes;
  // Weights of other directories are refused when the job is opened.
  sizes.records_by_directory = RecordFiles::BytesNeeded(
      records, options.directories,
      shape.weights.size() == options.directories ? shape.weights
                                                  : std::vector<uint32_t>(),
      static_cast<uint32_t>(shape.records), shape.slots);
  for (const uint64_t bytes : sizes.records_by_directory) {
    sizes.directories.push_back(io::kSectorBytes + bytes);
  }
  if (options.is_durable) {
    sizes.directories[0] +=
        io::kSectorBytes +
        2 * DurableLog::RegionBytes(shape.records, shape.checksums,
                                    DurableLog::RoomFor(options.job_bytes),
                                    shape.weights.size());
  }
  for (const uint64_t bytes : sizes.directories) sizes.disk += bytes;
  return sizes;
}

FrameTable::Shape StoreOpener::ShapeOf() const {
  FrameTable::Shape shape;
  shape.incarnation = context_.options.incarnation;
  shape.records = context_.records();
  shape.checksums = context_.record_layout.checksum_count();
  shape.frames = context_.frames();
  shape.frame_bytes = context_.record_layout.frame_bytes();
  shape.slots = context_.slots;
  shape.paths = static_cast<uint32_t>(context_.options.directories.size());
  shape.weights = context_.weights;
  shape.lacks_sections =
      context_.record_layout.section() == RecordSection::kNone;
  return shape;
}

// Takes the weights of a job that exists, or those given for a new one.
absl::Status StoreOpener::ChooseWeights(
    const storage::DurableCommit* restored) {
  const NvmeOptions& options = context_.options;
  const absl::Span<const uint32_t> given = options.weights;
  OPTSTATE_RETURN_IF_ERROR(
      storage::CheckWeights(given, options.directories.size()));
  const bool is_made = FrameTable::IsMade(options.table);
  if (!is_made && restored == nullptr) {
    context_.weights = storage::SmallestWeights(given);
    return absl::OkStatus();
  }
  if (is_made) {
    OPTSTATE_ASSIGN_OR_RETURN(context_.weights,
                              FrameTable::ReadWeights(options.table));
  } else {
    context_.weights = restored->weights;
  }
  if (given.empty() || storage::SmallestWeights(given) == context_.weights) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      options.directories[0],
      ": the job's records are split over its directories by ",
      storage::WeightsText(context_.weights), ", not by ",
      storage::WeightsText(given),
      ": optctl set job NAME directory_weights= splits them anew"));
}

absl::Status StoreOpener::Open(const storage::DurableCommit* restored) {
  OPTSTATE_RETURN_IF_ERROR(ChooseWeights(restored));
  const NvmeOptions& options = context_.options;
  const FrameTable::Shape shape = ShapeOf();
  // A damaged table may give frames another size, so it is checked first.
  const bool is_made = FrameTable::IsMade(options.table);
  if (is_made) OPTSTATE_RETURN_IF_ERROR(context_.table.Check(shape));
  if (shape.frames < storage::kSwapFramesMin) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a host budget of ", options.frames.size(), " bytes has room for ",
        shape.frames, " records of ", shape.frame_bytes,
        " bytes; it must hold ", storage::kSwapFramesMin,
        ": raise host_budget to ", storage::kSwapFramesMin * shape.frame_bytes,
        " or make sub_group_size smaller"));
  }
  if (context_.holds_parameters() &&
      options.parameter_cache_bytes <
          storage::kSwapCacheSectionsMin *
              context_.record_layout.section_bytes_max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a parameter cache of ", options.parameter_cache_bytes,
                     " bytes: it must hold ", storage::kSwapCacheSectionsMin,
                     " times the parameters of a record, ",
                     context_.record_layout.section_bytes_max(), " bytes"));
  }
  if (options.table.size() < FrameTable::BytesNeeded(shape)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the frame table has ", options.table.size(),
                     " bytes, it needs ", FrameTable::BytesNeeded(shape)));
  }
  context_.engine.RegisterMemory(context_.frame_memory);
  OPTSTATE_RETURN_IF_ERROR(
      OpenFiles(/*is_new=*/!is_made && restored == nullptr, restored));
  if (!is_made) MakeTable(restored);
  context_.table.SetFrames(shape.frames);
  return absl::OkStatus();
}

void StoreOpener::MakeTable(const storage::DurableCommit* restored) {
  context_.table.Make(ShapeOf());
  if (restored == nullptr) return;
  for (uint32_t i = 0; i < context_.records(); ++i) {
    RecordPlace place;
    place.slot = restored->places[i] & 1;
    place.is_on_disk = (restored->places[i] & 2) != 0;
    const auto from = absl::MakeConstSpan(restored->checksums);
    const absl::Span<uint32_t> to = context_.table.checksums(place.slot);
    context_.record_layout.CopyChecksums(i, from, to);
    context_.table.SetPlace(i, place);
  }
}

absl::Status StoreOpener::OpenFiles(bool is_new,
                                    const storage::DurableCommit* restored) {
  io::IoEngine* const engine = &context_.engine;
  const absl::Span<const std::string> directories =
      context_.options.directories;
  if (is_new) {
    OPTSTATE_RETURN_IF_ERROR(CheckNothingDurable());
    OPTSTATE_RETURN_IF_ERROR(DurableLog::Remove(engine, directories[0]));
    OPTSTATE_RETURN_IF_ERROR(
        RecordFiles::Remove(engine, directories, context_.options.arrangement));
  }
  if (restored != nullptr) OPTSTATE_RETURN_IF_ERROR(CheckRestored(*restored));
  const RecordFiles::Shape shape = {
      directories,    context_.weights,         context_.records(),
      context_.slots, context_.options.extents, context_.options.arrangement};
  OPTSTATE_ASSIGN_OR_RETURN(
      RecordFiles files,
      is_new ? RecordFiles::Create(engine, context_.record_layout, shape)
             : RecordFiles::Open(engine, context_.record_layout, shape));
  context_.files = std::move(files);
  if (context_.options.is_durable) OPTSTATE_RETURN_IF_ERROR(OpenLog(is_new));
  RemoveOtherArrangements();
  return absl::OkStatus();
}

// Removes what is left of the arrangement before this one, or of one that did
// not come about: the commits on disk, and the table, are of this one. What
// cannot be removed now harms nothing until records are written anew.
void StoreOpener::RemoveOtherArrangements() const {
  const uint32_t next = context_.options.arrangement + 1;
  const std::vector<std::string>& directories = context_.options.directories;
  RecordFiles::Remove(&context_.engine, directories, next).IgnoreError();
  DurableLog::RemoveNext(&context_.engine, directories[0], next).IgnoreError();
}

// Refuses to begin anew over a durable job: it is restored, or deleted first.
absl::Status StoreOpener::CheckNothingDurable() const {
  const std::string& directory = context_.options.directories[0];
  const auto former = DurableLog::Open(&context_.engine, directory);
  if (!former.ok() || (*former)->last().generation == 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      directory, " has a durable job, at step ", (*former)->last().step,
      ": a new one is not made over it. Start optstated again to have it back, "
      "or move ",
      directory, " away"));
}

absl::Status StoreOpener::OpenLog(bool is_new) {
  io::IoEngine* const engine = &context_.engine;
  const absl::Span<const std::string> directories =
      context_.options.directories;
  const uint64_t region_bytes = DurableLog::RegionBytes(
      context_.records(), context_.record_layout.checksum_count(),
      DurableLog::RoomFor(context_.options.job_bytes), context_.weights.size());
  if (!is_new) {
    OPTSTATE_RETURN_IF_ERROR(DurableLog::Adopt(engine, directories[0],
                                               context_.options.arrangement));
  }
  auto log = is_new ? DurableLog::Create(engine, directories[0], region_bytes)
                    : OpenExistingLog(engine, directories[0]);
  if (!log.ok()) {
    if (is_new) {
      context_.files->Close(engine);
      RecordFiles::Remove(engine, directories, context_.options.arrangement)
          .IgnoreError();
    }
    return log.status();
  }
  context_.log = *std::move(log);
  const storage::DurableCommit& last = context_.log->last();
  if (last.generation != 0 &&
      last.incarnation != context_.options.incarnation) {
    return absl::FailedPreconditionError(absl::StrCat(
        directories[0],
        "/commits is of another job, made anew or before this "
        "one: is another disk mounted there than when the job was made?"));
  }
  if (last.generation != 0 && last.weights != context_.weights) {
    return absl::DataLossError(absl::StrCat(
        directories[0], "/commits is of records that are split by ",
        storage::WeightsText(last.weights), ", frame_table of ones by ",
        storage::WeightsText(context_.weights)));
  }
  return context_.log->Settle();
}

absl::Status StoreOpener::CheckRestored(
    const storage::DurableCommit& restored) const {
  const FrameTable::Shape shape = ShapeOf();
  if (restored.slots == shape.slots && restored.paths == shape.paths &&
      restored.places.size() == shape.records &&
      restored.checksums.size() == shape.checksums) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat(
      context_.options.directories[0], "/commits is of ",
      restored.places.size(), " records with ", restored.checksums.size(),
      " checksums over ", restored.paths, " directories, the job has ",
      shape.records, ", ", shape.checksums, " and ", shape.paths));
}

std::vector<uint8_t> StoreOpener::MarkUnsynced(const Committer& committer) {
  std::vector<uint8_t> unsynced(context_.records(), 0);
  if (!context_.options.is_durable || !context_.table.is_syncing()) {
    return unsynced;
  }
  for (uint32_t i = 0; i < context_.records(); ++i) {
    RecordPlace place = context_.table.place(i);
    if (!place.is_on_disk || place.slot == committer.durable_slot(i)) continue;
    if (place.frame == RecordPlace::kNoFrame) {
      unsynced[i] = 1;
      continue;
    }
    place.is_dirty = true;
    context_.table.SetPlace(i, place);
  }
  return unsynced;
}

}  // namespace optstate::nvme
