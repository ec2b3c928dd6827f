// The formats of a job's files that are parsed in memory. Input: a byte that
// says which format, a byte of flags (1: checksums are made right, so that what
// lies behind them is reached), the bytes.

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "server/session/durability/durable_job.h"
#include "server/session/job_description.h"
#include "storage/block_device/superblock.h"
#include "storage/format/checked_file.h"
#include "storage/format/checksum.h"
#include "storage/format/control_file.h"
#include "storage/format/load_log.h"
#include "storage/format/step_intent.h"
#include "storage/tiers/nvme/frame_table.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/scratch_folder.h"

namespace optstate::fuzz {
namespace {

constexpr uint64_t kIncarnation = 0x1122334455667788;
constexpr uint64_t kGroups = 2;
constexpr uint64_t kParameters = 3;
constexpr uint64_t kStep = 5;
constexpr uint8_t kRightChecksums = 1;

enum class Format : uint8_t {
  kControl,
  kStepIntent,
  kLoadLog,
  kDescription,
  kDurableJob,
  kSuperblock,
  kFrameTable,
};
constexpr uint8_t kFormats = 7;

// A copy in memory that is aligned as a mapping is, and padded with zeros.
class AlignedCopy {
 public:
  AlignedCopy(absl::string_view bytes, size_t size_min)
      : words_((std::max(bytes.size(), size_min) + 7) / 8),
        size_(std::max(bytes.size(), size_min)) {
    if (!bytes.empty()) std::memcpy(words_.data(), bytes.data(), bytes.size());
  }
  absl::Span<std::byte> bytes() {
    return {reinterpret_cast<std::byte*>(words_.data()), size_};
  }
  template <typename T>
  T* At(size_t offset) {
    return reinterpret_cast<T*>(bytes().data() + offset);
  }

 private:
  std::vector<uint64_t> words_;
  size_t size_;
};

void ReadControl(absl::string_view bytes, bool right_checksums) {
  AlignedCopy copy(bytes.substr(0, sizeof(storage::ControlFile)),
                   sizeof(storage::ControlFile));
  auto* const control = copy.At<storage::ControlFile>(0);
  if (right_checksums) {
    const auto lag = static_cast<storage::Lag>(control->version % 3);
    storage::StepRecord record = storage::CurrentRecord(*control);
    // Makes the header's checksum; the record becomes the current one.
    control->sequence.fetch_sub(1);
    storage::InitControlFile(kIncarnation, control->created_at_ns, record,
                             control);
    storage::SetLag(lag, control);
  }
  if (!storage::CheckControlFile(*control, kIncarnation, kParameters).ok()) {
    return;
  }
  Require(
      control->counts_begun.load() <= kParameters &&
          control->parameter_loading.load() <= kParameters &&
          storage::CurrentRecord(*control).load_required_from <= kParameters,
      "parameters that a control file names exist");
  (void)storage::LoadIsSealed(*control);
  (void)storage::MayLag(*control);
}

void ReadIntent(absl::string_view bytes, bool right_checksums) {
  AlignedCopy copy(bytes, sizeof(storage::StepIntentHeader));
  const absl::Span<std::byte> file = copy.bytes();
  auto* const header = copy.At<storage::StepIntentHeader>(0);
  if (right_checksums) {
    const uint64_t all = storage::StepIntentBytes(kGroups, kParameters);
    const uint64_t used =
        all - (header->has_pushed_by == 0 ? kParameters * 8 : 0);
    const uint64_t rest =
        std::min<uint64_t>(used, file.size()) - sizeof(*header);
    const uint32_t parts[2] = {
        storage::Crc32c(header, offsetof(storage::StepIntentHeader, crc32c)),
        storage::Crc32c(header + 1, rest)};
    header->crc32c = storage::Crc32c(parts, sizeof(parts));
  }
  storage::StepIntent intent;
  if (!storage::ReadStepIntent(file, kStep, kGroups, kParameters, &intent)
           .ok()) {
    return;
  }
  // Every byte that it points to is read.
  const std::vector<storage::StepIntentGroup> groups(intent.groups.begin(),
                                                     intent.groups.end());
  const std::vector<uint8_t> updated(intent.updated.begin(),
                                     intent.updated.end());
  const std::vector<uint64_t> pushed_by(intent.pushed_by.begin(),
                                        intent.pushed_by.end());
  Require(groups.size() == kGroups && updated.size() == kParameters &&
              (pushed_by.empty() || pushed_by.size() == kParameters),
          "an intent is of the layout's groups and parameters");
}

// Returns the seal of a log, whatever its entries say, and makes the checksums
// of payloads that lie in it.
storage::LoadLogSeal SealOf(AlignedCopy* copy) {
  const absl::Span<std::byte> file = copy->bytes();
  uint32_t chain = storage::Crc32c(file.data(), sizeof(storage::LoadLogHeader));
  uint64_t offset = sizeof(storage::LoadLogHeader);
  while (offset + sizeof(storage::LoadLogEntry) <= file.size()) {
    auto* const entry = copy->At<storage::LoadLogEntry>(offset);
    const uint64_t left = file.size() - offset - sizeof(*entry);
    if (entry->payload_bytes > left) break;
    entry->payload_crc32c = storage::Crc32c(entry + 1, entry->payload_bytes);
    const struct {
      storage::LoadLogEntry entry;
      uint64_t before;
    } link = {*entry, chain};
    chain = storage::Crc32c(&link, sizeof(link));
    offset = (offset + sizeof(*entry) + entry->payload_bytes + 7) / 8 * 8;
  }
  return {.bytes = file.size(), .crc32c = chain};
}

void ReadLog(absl::string_view bytes, bool right_checksums) {
  AlignedCopy copy(bytes, sizeof(storage::LoadLogHeader));
  const storage::LoadLogHeader expected = {.loads_finished = 1,
                                           .incarnation = kIncarnation,
                                           .committed_step = kStep};
  storage::LoadLogSeal seal = {.bytes = bytes.size(), .crc32c = 1};
  if (right_checksums) {
    std::memcpy(copy.bytes().data(), &expected, sizeof(expected));
    seal = SealOf(&copy);
  }
  const auto records = storage::ReadLoadLog(copy.bytes(), expected, seal);
  if (!records.ok()) return;
  for (const storage::LoadLogRecord& record : *records) {
    Require(record.entry.payload_bytes <= copy.bytes().size() &&
                record.payload + record.entry.payload_bytes <=
                    copy.bytes().data() + copy.bytes().size(),
            "a payload lies in its log");
  }
}

void ReadDescription(absl::string_view bytes, bool right_checksums) {
  static const ScratchFolder* const folder = new ScratchFolder();
  std::string payload(bytes);
  if (!right_checksums) {
    folder->Write("job.binpb", bytes);
    const auto file = storage::ReadCheckedFile(folder->path() + "/job.binpb");
    if (!file.ok()) return;
    payload = file->payload;
  }
  const auto description = session::ParseDescription(payload);
  if (!description.ok()) return;
  const std::string written = session::SerializeDescription(*description);
  const auto again = session::ParseDescription(written);
  Require(again.ok() && session::SerializeDescription(*again) == written,
          "a description that is written can be read back");
  Require(again->layout.hash() == description->layout.hash(),
          "a layout keeps its hash");
  if (description->layout.parameters().size() > 1000) return;
  (void)MakeRankPartition(description->layout, description->partition,
                          description->world_size, 0);
}

void ReadDurableJob(absl::string_view bytes) {
  const auto job = session::ParseDurableJob(bytes);
  if (!job.ok()) return;
  Require(session::SerializeDurableJob(*job) == bytes,
          "what a commit says of its job is read whole");
}

void ReadSuperblock(absl::string_view bytes, bool right_checksums) {
  std::string block(bytes.substr(0, storage::kSuperblockBytes));
  if (right_checksums) {
    block.resize(storage::kSuperblockBytes);
    const uint32_t crc = storage::Crc32c(block.data(), block.size() - 4);
    std::memcpy(block.data() + block.size() - 4, &crc, sizeof(crc));
  }
  const auto read = storage::DecodeSuperblock(block);
  if (!read.ok()) return;
  Require(storage::IsDeviceId(read->device_id) &&
              storage::IsDeviceId(read->directory_id),
          "a superblock has ids");
}

nvme::FrameTable::Shape TableShape(bool has_weights) {
  nvme::FrameTable::Shape shape;
  shape.incarnation = kIncarnation;
  shape.records = 4;
  shape.checksums = 9;
  shape.frame_bytes = 65536;
  shape.frames = 2;
  shape.slots = 2;
  shape.paths = 2;
  if (has_weights) shape.weights = {1, 3};
  return shape;
}

void ReadFrameTable(absl::string_view bytes, bool right_checksums) {
  constexpr size_t kHeaderBytes = 64;
  AlignedCopy copy(bytes, 0);
  if (!nvme::FrameTable::IsMade(copy.bytes())) return;
  const auto weights = nvme::FrameTable::ReadWeights(copy.bytes());
  (void)nvme::FrameTable::FrameBytesOf(copy.bytes());
  if (!weights.ok()) return;
  nvme::FrameTable::Shape shape = TableShape(false);
  shape.weights = *weights;
  shape.lacks_sections = !nvme::FrameTable::HasSections(copy.bytes());
  if (right_checksums && copy.bytes().size() > kHeaderBytes) {
    // The checksum is the sixth number of 32 bits, of those beside it.
    uint32_t crc = storage::ExtendCrc32c(0, copy.At<char>(8), 12);
    crc = storage::ExtendCrc32c(crc, copy.At<char>(24), 32);
    if (!weights->empty()) {
      crc = storage::ExtendCrc32c(crc, weights->data(), weights->size() * 4);
    }
    *copy.At<uint32_t>(20) = crc;
  }
  nvme::FrameTable table(copy.bytes());
  if (!table.Check(shape).ok()) return;
  for (uint32_t record = 0; record < shape.records; ++record) {
    const nvme::RecordPlace place = table.place(record);
    Require(place.slot < shape.slots &&
                table.checksums(place.slot).size() == shape.checksums,
            "a place names a slot");
  }
}

Layout SmallLayout() {
  LayoutSpec spec;
  spec.groups = {{}, {.options = adam::kAmsgrad}};
  spec.parameters = {
      {.name = "a", .shape = {50, 100}, .numel = 5000, .group = 0},
      {.name = "b",
       .shape = {7},
       .numel = 7,
       .dtype = DType::kBFloat16,
       .gradient_dtype = DType::kBFloat16,
       .group = 1}};
  return Layout::Make(std::move(spec)).value();
}

std::string Input(Format format, uint8_t flags, absl::string_view bytes) {
  return FuzzBytes(format) + FuzzBytes(flags) + std::string(bytes);
}

std::string ControlInput() {
  alignas(64) std::byte bytes[sizeof(storage::ControlFile)] = {};
  auto* const control = reinterpret_cast<storage::ControlFile*>(bytes);
  storage::StepRecord record = {};
  record.committed_step = kStep;
  record.load_touched_from = storage::kNoParameter;
  record.load_required_from = kParameters;
  storage::InitControlFile(kIncarnation, 1700000000000000000, record, control);
  control->step_in_progress.store(kStep + 1);
  return Input(Format::kControl, kRightChecksums,
               {reinterpret_cast<const char*>(bytes), sizeof(bytes)});
}

std::string IntentInput() {
  storage::StepIntentHeader header = {};
  header.record.committed_step = kStep;
  const std::vector<storage::StepIntentGroup> groups(kGroups);
  const std::vector<uint8_t> updated(kParameters, 1);
  const std::vector<uint64_t> pushed_by(kParameters, 3);
  std::string bytes(storage::StepIntentBytes(kGroups, kParameters), '\0');
  storage::WriteStepIntent(
      header, groups, updated, pushed_by,
      {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()});
  return Input(Format::kStepIntent, 0, bytes);
}

std::string LogInput() {
  const storage::LoadLogHeader header = {.loads_finished = 1,
                                         .incarnation = kIncarnation,
                                         .committed_step = kStep};
  std::string bytes = FuzzBytes(header);
  for (const uint64_t payload : {16, 24}) {
    bytes += FuzzBytes(storage::LoadLogEntry{
        .array = 1, .numel = payload / 4, .payload_bytes = payload});
    bytes += std::string(payload, 'p');
  }
  return Input(Format::kLoadLog, kRightChecksums, bytes);
}

std::string TableInput(bool has_weights) {
  const nvme::FrameTable::Shape shape = TableShape(has_weights);
  AlignedCopy copy({}, nvme::FrameTable::BytesNeeded(shape));
  nvme::FrameTable table(copy.bytes());
  table.Make(shape);
  table.SetPlace(1, {.frame = 1, .slot = 1, .is_on_disk = true});
  return Input(Format::kFrameTable, kRightChecksums,
               {copy.At<char>(0), copy.bytes().size()});
}

}  // namespace

std::vector<std::string> Seeds() {
  session::JobDescription description;
  description.layout = SmallLayout();
  description.world_size = 2;
  description.host_id = "host";
  const std::string text = session::SerializeDescription(description);
  session::DurableJob job;
  job.description = text;
  job.step_counts = {1, 2};
  job.scalars = {0.5, 0.25};
  return {ControlInput(),
          IntentInput(),
          LogInput(),
          Input(Format::kDescription, kRightChecksums, text),
          Input(Format::kDurableJob, 0, session::SerializeDurableJob(job)),
          Input(Format::kSuperblock, kRightChecksums,
                storage::EncodeSuperblock({.device_id = std::string(32, 'a'),
                                           .directory_id = std::string(32, 'b'),
                                           .device_bytes = 1 << 30})),
          TableInput(false),
          TableInput(true)};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate::fuzz;
  FuzzInput input(data, size);
  const auto format = static_cast<Format>(input.Take<uint8_t>() % kFormats);
  const bool right = (input.Take<uint8_t>() & kRightChecksums) != 0;
  switch (format) {
    case Format::kControl:
      ReadControl(input.rest(), right);
      break;
    case Format::kStepIntent:
      ReadIntent(input.rest(), right);
      break;
    case Format::kLoadLog:
      ReadLog(input.rest(), right);
      break;
    case Format::kDescription:
      ReadDescription(input.rest(), right);
      break;
    case Format::kDurableJob:
      ReadDurableJob(input.rest());
      break;
    case Format::kSuperblock:
      ReadSuperblock(input.rest(), right);
      break;
    case Format::kFrameTable:
      ReadFrameTable(input.rest(), right);
      break;
  }
  return 0;
}
