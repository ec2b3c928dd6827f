#include "storage/tiers/nvme/store_context.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace optstate::nvme {

StoreContext::StoreContext(const Layout* the_layout,
                           const SubGroupTable* the_sub_groups,
                           std::byte* the_parameters, NvmeOptions the_options)
    : layout(*the_layout),
      sub_groups(*the_sub_groups),
      parameters(the_parameters),
      options(std::move(the_options)),
      engine(*options.engine),
      record_layout(the_layout, the_sub_groups,
                    SectionOf(options.is_durable, holds_parameters(),
                              FrameTable::HasSections(options.table))),
      slots(options.is_durable ? 2 : 1),
      frame_memory(options.frames),
      table(options.table) {}

size_t StoreContext::DirectoryOf(io::FileId file) const {
  const absl::Span<const io::FileId> all = files->files();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].index == file.index) return i;
  }
  return 0;  // that of the commits
}

absl::Status StoreContext::DamagedError(uint32_t record, uint32_t slot,
                                        int64_t tile) const {
  const RecordFiles::Place at = files->PlaceOf(record, slot);
  const SubGroup& range = sub_groups[record];
  const auto tiles = static_cast<int64_t>(
      (range.elements() + kTileElements - 1) / kTileElements);
  return absl::DataLossError(absl::StrCat(
      FileOf(record), ": the record at byte ", at.offset_bytes, " (",
      record_layout.bytes(record), " bytes, ",
      tile < tiles ? absl::StrCat("tile ", tile) : "its parameters",
      ", of parameters \"", layout.parameters()[range.first_parameter].name,
      "\" to \"", layout.parameters()[range.end_parameter - 1].name,
      "\") is not what was written: its checksum differs. The disk, or "
      "something that wrote to the file, has damaged it; load the job anew "
      "from a checkpoint"));
}

}  // namespace optstate::nvme
