#ifndef OPTSTATE_STORAGE_TIERS_NVME_DURABLE_LOG_H_
#define OPTSTATE_STORAGE_TIERS_NVME_DURABLE_LOG_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "storage/io/io_engine.h"

namespace optstate::nvme {

// All of a job at one durable step, but the records themselves.
struct DurableCommit {
  uint64_t generation = 0;  // counts the commits of the job, from 1 on
  uint64_t step = 0;
  uint64_t incarnation = 0;  // of the job
  uint32_t slots = 2;
  uint32_t paths = 1;
  // Of the directories, see SplitRecords(); none: equal parts.
  std::vector<uint32_t> weights;
  // By record: bit 0 is the slot, bit 1 says whether the slot has the record
  // (else the record is all zeros).
  std::vector<uint8_t> places;
  std::vector<uint32_t> checksums;  // those of the slots that are named
  std::string job;  // what the session keeps: description, counts, record
};

// The file `commits` of a job, in the first of its directories on disk: a
// sector that says how large a region is, and two regions, which take turns, so
// that a commit which a power cut interrupts leaves the one before it whole.
// Bytes: FORMAT.md.
//
// Threads: as its engine.
class DurableLog {
 public:
  // Returns the size of a region for so many records, checksums, bytes of
  // DurableCommit::job and weights.
  static uint64_t RegionBytes(uint64_t records, uint64_t checksums,
                              uint64_t job_bytes, uint64_t weights);

  // Makes the file. `engine` outlives this.
  static absl::StatusOr<std::unique_ptr<DurableLog>> Create(
      io::IoEngine* engine, const std::string& directory,
      uint64_t region_bytes);
  // Opens the file and reads its newest whole commit. NOT_FOUND: there is no
  // file, or its making was not finished; DATA_LOSS: it cannot be read, or is
  // no such file;
  // FAILED_PRECONDITION: it is of another version or byte order.
  static absl::StatusOr<std::unique_ptr<DurableLog>> Open(
      io::IoEngine* engine, const std::string& directory);
  // Removes the file, if it is there.
  static absl::Status Remove(io::IoEngine* engine,
                             const std::string& directory);

  // The commit that Open() found; of generation 0 when there is none.
  const DurableCommit& last() const { return last_; }
  // Says what is wrong with a region that has no whole commit, as after a power
  // cut within one; OK: both have one, or were never written. A region that the
  // disk does not read is no such case: Open() fails, for it may be the newest.
  const absl::Status& damage() const { return damage_; }
  // Says whether the damage is that of a first commit which was not written to
  // its end: the other region was never written.
  bool is_first_torn() const { return is_first_torn_; }
  io::FileId file() const { return file_; }

  // Makes sure that last() is durable. What Open() read may be in a cache only:
  // the engine before may have died before its sync, or the sync failed. So the
  // region is written again, with the same bytes, and synced.
  absl::Status Settle();

  // Lays the commit out for writing to the region whose turn it is, and returns
  // the request that writes it, which the caller submits and syncs.
  // RESOURCE_EXHAUSTED: the commit does not fit the region.
  absl::StatusOr<io::IoRequest*> Prepare(const DurableCommit& commit);

 private:
  DurableLog(io::IoEngine* engine, std::string path);
  absl::Status Allocate(uint64_t region_bytes);
  // Runs one request on the file to its end; a read that fails is tried again.
  absl::Status Run(io::IoRequest::Kind kind, uint64_t offset_bytes,
                   uint64_t bytes);
  absl::Status WriteSuperblock();
  absl::Status ReadSuperblock();
  uint64_t RegionAt(uint64_t generation) const {
    return io::kSectorBytes + generation % 2 * region_bytes_;
  }
  // Reads the commit out of a region's bytes, which are in the buffer.
  absl::StatusOr<DurableCommit> ParseRegion(uint32_t region) const;

  io::IoEngine* engine_;
  std::string path_;
  io::FileId file_;
  std::unique_ptr<std::byte, decltype(&std::free)> buffer_{nullptr, &std::free};
  uint64_t region_bytes_ = 0;
  io::IoRequest request_;
  DurableCommit last_;
  absl::Status damage_;
  bool is_first_torn_ = false;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_DURABLE_LOG_H_
