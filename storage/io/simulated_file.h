#ifndef OPTSTATE_STORAGE_IO_SIMULATED_FILE_H_
#define OPTSTATE_STORAGE_IO_SIMULATED_FILE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace optstate::io {

// The bytes that a disk writes whole or not at all.
inline constexpr uint64_t kSimulatedSectorBytes = 512;

// Bytes of a file, zero at first. Copies share what neither has changed, so a
// copy costs a pointer for every 4 KiB.
class SimulatedImage {
 public:
  explicit SimulatedImage(uint64_t bytes);

  uint64_t bytes() const { return bytes_; }
  // The range lies inside.
  void Read(uint64_t offset, absl::Span<std::byte> data) const;
  void Write(uint64_t offset, absl::Span<const std::byte> data);
  void Resize(uint64_t bytes);

 private:
  static constexpr uint64_t kBlockBytes = 4096;
  using Block = std::array<std::byte, kBlockBytes>;

  uint64_t bytes_;
  std::vector<std::shared_ptr<Block>> blocks_;  // null: zeros
};

// One file of a simulated disk: what reads see, what a power cut certainly
// leaves, and the writes in between.
//
// Invariant: the medium holds, of each sector, the durable version or that of
// any write in the log. A write enters the log when it begins, since its
// sectors may reach the medium from then on, and leaves it by a sync that
// succeeds.
class SimulatedFile {
 public:
  explicit SimulatedFile(uint64_t bytes) : current_(bytes), durable_(bytes) {}

  uint64_t bytes() const { return current_.bytes(); }
  void Read(uint64_t offset, absl::Span<std::byte> data) const {
    current_.Read(offset, data);
  }

  // `number` is larger than those of all writes before. Reads see the data when
  // the write has ended.
  void BeginWrite(uint64_t number, uint64_t offset,
                  absl::Span<const std::byte> data);
  // Ends a write with those of its sectors that `keep` accepts by their index
  // in the write; the others never reach the medium.
  void EndWrite(uint64_t number, absl::FunctionRef<bool(uint64_t)> keep);

  // Marks the writes that have ended by now.
  uint64_t SyncMark() const { return ended_; }
  // Makes the writes up to the mark durable.
  void Sync(uint64_t mark);
  // A sync up to the mark has failed: no later sync makes these writes durable,
  // although reads see them, and any of their sectors may have been written.
  void FailSync(uint64_t mark);

  // Changes bytes at rest, in every version.
  void Flip(uint64_t offset, std::byte mask);
  void Truncate(uint64_t bytes);

  // The numbers of the writes in the log that have a version of a sector, by
  // the sector's index in the file, oldest write first.
  std::map<uint64_t, std::vector<uint64_t>> UnsyncedSectors() const;
  // Returns the file after a power cut. `choose` gets a sector and its writes,
  // and returns which of them the medium holds, 0 for the durable version and n
  // for the nth write.
  SimulatedFile AfterCrash(
      absl::FunctionRef<int(uint64_t sector, absl::Span<const uint64_t> writes)>
          choose) const;
  // Returns the file after the death of the process. `keep` says whether a
  // sector of a write that has not ended is written.
  SimulatedFile AfterKill(absl::FunctionRef<bool()> keep) const;

 private:
  struct LoggedWrite {
    uint64_t number = 0;
    uint64_t offset = 0;
    // The bytes written, which copies of the file share.
    std::shared_ptr<std::vector<std::byte>> data;
    // True, by sector, where the medium may hold this version.
    std::vector<bool> possible;
    uint64_t ended = 0;  // its place among the ended writes, 0 before it is one
    bool lost = false;   // by FailSync
  };
  bool IsCovered(const LoggedWrite& write, uint64_t mark) const {
    return write.ended != 0 && write.ended <= mark && !write.lost;
  }
  // Removes the log's versions of a sector that are older than a write.
  void ForgetOlder(uint64_t sector, uint64_t number);
  static absl::Span<const std::byte> SectorOf(const LoggedWrite& write,
                                              uint64_t sector);

  SimulatedImage current_;
  SimulatedImage durable_;
  std::vector<LoggedWrite> log_;  // by number
  uint64_t ended_ = 0;
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_SIMULATED_FILE_H_
