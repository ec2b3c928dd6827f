#ifndef OPTSTATE_STORAGE_TIERS_NVME_STORE_CONTEXT_H_
#define OPTSTATE_STORAGE_TIERS_NVME_STORE_CONTEXT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/sub_groups.h"
#include "storage/io/io_engine.h"
#include "storage/tiers/nvme/durable_log.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/nvme_options.h"
#include "storage/tiers/nvme/record_files.h"
#include "storage/tiers/nvme/record_layout.h"

namespace optstate::nvme {

// Returns the section of a job's records. `has_sections`: the job exists, and
// its frame table has that (FrameTable::HasSections).
constexpr RecordSection SectionOf(bool is_durable, bool holds_parameters,
                                  bool has_sections) {
  if (holds_parameters) return RecordSection::kAll;
  return is_durable || has_sections ? RecordSection::kMasters
                                    : RecordSection::kNone;
}

// The engine, files and memory that the rooms of an NvmeStore share.
//
// StoreOpener sets weights, files and log; all is immutable after that, but for
// the contents of the table and the log, and for the frames and the arrangement
// (with the table), which are changed while the thread of I/O does not run.
// Places in the table are used with the store's lock held; a slot's checksums
// by the thread that reads or writes it.
struct StoreContext {
  // All but `options` outlive this. `parameters` is the area, if there is one.
  StoreContext(const Layout* layout, const SubGroupTable* sub_groups,
               std::byte* parameters, NvmeOptions options);

  uint32_t records() const { return static_cast<uint32_t>(sub_groups.size()); }
  uint32_t frames() const {
    return static_cast<uint32_t>(frame_memory.size() /
                                 record_layout.frame_bytes());
  }
  std::byte* FrameAt(uint32_t frame) const {
    return frame_memory.data() + frame * record_layout.frame_bytes();
  }
  // Says whether parameters are a part of records, so that there is no area.
  bool holds_parameters() const { return options.holds_parameters; }
  // Says whether records are written with a section of parameters: where there
  // is an area, for a power cut only.
  bool writes_parameters() const {
    return options.is_durable || holds_parameters();
  }
  // Returns the bytes of a record that are written.
  uint64_t WrittenBytes(uint32_t record) const {
    return writes_parameters() ? record_layout.bytes(record)
                               : record_layout.state_bytes(record);
  }
  // Returns the file, or the device, that the record is in.
  const std::string& FileOf(uint32_t record) const {
    return files->PathOf(record);
  }
  // Returns the directory of one of the store's files.
  size_t DirectoryOf(io::FileId file) const;
  // Returns the error of a record whose checksums differ from `tile` on, as
  // RecordLayout::FirstDifference() gives it.
  absl::Status DamagedError(uint32_t record, uint32_t slot, int64_t tile) const;

  const Layout& layout;
  const SubGroupTable& sub_groups;
  std::byte* const parameters;
  NvmeOptions options;
  io::IoEngine& engine;
  const RecordLayout record_layout;
  const uint32_t slots;                // of each record
  absl::Span<std::byte> frame_memory;  // whole frames
  FrameTable table;
  std::vector<uint32_t> weights;     // in their smallest form
  std::optional<RecordFiles> files;  // once they are open
  std::unique_ptr<DurableLog> log;   // of a durable job
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_STORE_CONTEXT_H_
