#ifndef OPTSTATE_STORAGE_FORMAT_LOAD_LOG_H_
#define OPTSTATE_STORAGE_FORMAT_LOAD_LOG_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace optstate::storage {

// The file `load`: the data that a load brings into a job, beside the state
// until all of it is there. Byte by byte: FORMAT.md.
//
// A header, then entries, each with its payload, from multiples of 8 bytes on.
// The step record that seals it has its length and a checksum over header and
// entries; each entry has that of its payload.

inline constexpr uint64_t kLoadLogMagic = 0x31444f4c54504f53;  // "SOPTLOD1"
inline constexpr uint32_t kLoadLogVersion = 1;

struct LoadLogHeader {
  uint64_t magic = kLoadLogMagic;
  uint32_t version = kLoadLogVersion;
  uint32_t loads_finished = 0;  // of the step record, before this load
  uint64_t incarnation = 0;     // equals that of job.binpb
  uint64_t committed_step = 0;  // the load is between it and the next one
};
static_assert(sizeof(LoadLogHeader) == 32);

// Elements [begin, +numel) of an array of a parameter. For arrays with a number
// per parameter: those of parameters [begin, +numel), and `parameter` is 0.
struct LoadLogEntry {
  uint32_t array = 0;  // optstate.v1.StateArray
  uint32_t parameter = 0;
  uint64_t begin = 0;
  uint64_t numel = 0;
  uint64_t payload_bytes = 0;
  uint32_t payload_crc32c = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(LoadLogEntry) == 40);

// The seal of a log, as its step record has it.
struct LoadLogSeal {
  uint64_t bytes = 0;
  uint32_t crc32c = 0;  // of header and entries
};

// A file that is being written; the writer does not interpret entries.
//
// Threads: not thread-safe.
class LoadLogWriter {
 public:
  // Begins the log; `file` has at least the header.
  void Begin(const LoadLogHeader& header, absl::Span<std::byte> file);
  // Moves the writer to the same bytes in a file that has grown and may lie
  // elsewhere.
  void Move(absl::Span<std::byte> file) { file_ = file; }

  // Returns the bytes that the file must have to append an entry with this
  // payload.
  uint64_t BytesWith(uint64_t payload_bytes) const;
  // Appends an entry; its payload, which follows, is the caller's to write.
  // Returns where the entry is.
  uint64_t Append(const LoadLogEntry& entry);
  // Makes the last entry longer, by a payload that follows the former one.
  void Extend(uint64_t numel, uint64_t payload_bytes);
  // Returns the bytes that the file must have then.
  uint64_t BytesWithMore(uint64_t payload_bytes) const {
    return bytes_ + payload_bytes;
  }

  LoadLogEntry& entry(uint64_t offset) const;
  std::byte* payload(uint64_t offset) const;
  // Sets the checksum of the entry's payload, once it is written or was
  // overwritten.
  void SetChecksum(uint64_t offset) const;

  uint64_t bytes() const { return bytes_; }
  // Seals the log; every payload has its checksum.
  LoadLogSeal Seal() const;

 private:
  absl::Span<std::byte> file_;
  uint64_t bytes_ = 0;
  uint64_t last_ = 0;  // entry
};

struct LoadLogRecord {
  LoadLogEntry entry;
  const std::byte* payload = nullptr;
};

// Reads the sealed entries, in order. `file` has the seal's bytes; the payloads
// point into it. DATA_LOSS, saying what was expected and found, when the file
// is no log, or that of another job or load, or damaged.
absl::StatusOr<std::vector<LoadLogRecord>> ReadLoadLog(
    absl::Span<const std::byte> file, const LoadLogHeader& expected,
    const LoadLogSeal& seal);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_FORMAT_LOAD_LOG_H_
