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
#include "storage/durable_commit.h"
#include "storage/io/io_engine.h"

namespace optstate::nvme {

// A commit is written so often, each time as the next generation.
inline constexpr uint32_t kCommitCopies = 2;

// The file `commits` of a job, in the first of its directories on disk: a
// sector that says how large a region is, and two regions, which take turns. A
// commit is written to one, synced, and then to the other. So a power cut
// leaves at least one region whole; and once the commit is durable both have
// it, so that the one whose disk damages a region does not go back to the
// commit before without a word. Bytes: FORMAT.md.
//
// Threads: as its engine.
class DurableLog {
 public:
  // Returns the size of a region for so many records, checksums, bytes of
  // DurableCommit::job and weights.
  static uint64_t RegionBytes(uint64_t records, uint64_t checksums,
                              uint64_t job_bytes, uint64_t weights);

  // Returns the room for DurableCommit::job of a job whose text has so many
  // bytes: it may grow a little, since its description is written anew when
  // ranks change its settings.
  static uint64_t RoomFor(uint64_t job_bytes) { return job_bytes + (64 << 10); }

  // Makes the file. `engine` outlives this.
  static absl::StatusOr<std::unique_ptr<DurableLog>> Create(
      io::IoEngine* engine, const std::string& directory,
      uint64_t region_bytes);
  // Makes the file of an arrangement to come, `commits.N`, in place of any that
  // is there. It counts when Adopt() has renamed it.
  static absl::StatusOr<std::unique_ptr<DurableLog>> CreateNext(
      io::IoEngine* engine, const std::string& directory, uint64_t region_bytes,
      uint32_t arrangement);
  // Has the commits of this arrangement take the place of those of the one
  // before, if they have a name of their own. They are durable.
  static absl::Status Adopt(io::IoEngine* engine, const std::string& directory,
                            uint32_t arrangement);
  // Removes the commits of an arrangement that did not come about, if they are
  // there.
  static absl::Status RemoveNext(io::IoEngine* engine,
                                 const std::string& directory,
                                 uint32_t arrangement);
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
  const storage::DurableCommit& last() const { return last_; }
  // Says what is wrong with a region that has no whole commit, as after a power
  // cut within one; OK: both have one, or were never written. A region that the
  // disk does not read is no such case: Open() fails, for it may be the newest.
  const absl::Status& damage() const { return damage_; }
  // Says whether the damage is that of a first commit which was not written to
  // its end: the other region was never written, so it was not durable yet.
  bool is_first_torn() const { return is_first_torn_; }
  io::FileId file() const { return file_; }

  // Makes sure that last() is durable. What Open() read may be in a cache only:
  // the engine before may have died before its sync, or the sync failed. So the
  // region is written again, with the same bytes, and synced; then the other
  // one gets the commit too.
  absl::Status Settle();
  // Writes a commit, whose generation is that of the last one, to both regions,
  // as the next two, and makes it durable. RESOURCE_EXHAUSTED: it does not fit.
  absl::Status Put(storage::DurableCommit commit);

  // Lays the commit out for writing to the region whose turn it is, and returns
  // the request that writes it, which the caller submits and syncs.
  // RESOURCE_EXHAUSTED: the commit does not fit the region.
  absl::StatusOr<io::IoRequest*> Prepare(const storage::DurableCommit& commit);

 private:
  DurableLog(io::IoEngine* engine, std::string path);
  static absl::StatusOr<std::unique_ptr<DurableLog>> CreateAt(
      io::IoEngine* engine, std::string path, uint64_t region_bytes);
  absl::Status Allocate(uint64_t region_bytes);
  // Runs one request on the file to its end; a read that fails is tried again.
  absl::Status Run(io::IoRequest::Kind kind, uint64_t offset_bytes,
                   uint64_t bytes);
  absl::Status WriteLast();
  absl::Status WriteSuperblock();
  absl::Status ReadSuperblock();
  uint64_t RegionAt(uint64_t generation) const {
    return io::kSectorBytes + generation % 2 * region_bytes_;
  }
  // Reads the commit out of a region's bytes, which are in the buffer.
  absl::StatusOr<storage::DurableCommit> ParseRegion(uint32_t region) const;

  io::IoEngine* engine_;
  std::string path_;
  io::FileId file_;
  std::unique_ptr<std::byte, decltype(&std::free)> buffer_{nullptr, &std::free};
  uint64_t region_bytes_ = 0;
  io::IoRequest request_;
  storage::DurableCommit last_;
  absl::Status damage_;
  bool is_first_torn_ = false;
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_DURABLE_LOG_H_
