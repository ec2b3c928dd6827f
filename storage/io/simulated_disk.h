#ifndef OPTSTATE_STORAGE_IO_SIMULATED_DISK_H_
#define OPTSTATE_STORAGE_IO_SIMULATED_DISK_H_

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "storage/io/io_engine.h"
#include "storage/io/simulated_file.h"

namespace optstate::io {

// Faults of some calls. A call is a request to the kernel, or the remainder of
// one after a short call.
struct SimulatedFault {
  enum class Effect : uint8_t {
    // The call fails with `error_number`. A failed write has written any of its
    // sectors; a failed sync drops the writes that it was for, see
    // SimulatedFile::FailSync().
    kError,
    // A read or write transfers `bytes` at most: a multiple of 512, not 0.
    kShort,
    // A write succeeds, but lies at the offset `bytes`, or as near to it as the
    // file's end permits.
    kMisdirect,
    // A sync succeeds without effect.
    kLostSync,
  };
  static constexpr uint64_t kForever = std::numeric_limits<uint64_t>::max();

  Effect effect = Effect::kError;
  // The calls: by kind (any), path (empty: any), and bytes [begin, end), of
  // which a read or write touches at least one.
  std::optional<IoRequest::Kind> kind = {};
  std::string path = {};
  uint64_t begin = 0;
  uint64_t end = kForever;
  // How many such calls go well first, and how many then do not.
  uint64_t skip = 0;
  uint64_t times = 1;

  int error_number = EIO;
  uint64_t bytes = kSimulatedSectorBytes;
};

// A moment at which a test may look at the disk, or take a crash state of it.
struct SimulatedEvent {
  enum class Kind : uint8_t {
    kWriteBegun,  // any of its sectors may now be on the medium
    kWriteEnded,
    kSyncBegun,
    kSyncEnded,
    kCreated,
    kRemoved,
    kRenamed,  // `path` is the new name
  };
  Kind kind = Kind::kWriteBegun;
  std::string path;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  int64_t result = 0;  // of an ended call, negative errno when it failed
};

// One sector of which several versions may be on the medium.
struct CrashSector {
  const std::string& path;
  uint64_t sector = 0;  // of 512 bytes
  // The writes since the last sync that have a version of it, oldest first.
  // Writes of all files are numbered in the order in which they began.
  absl::Span<const uint64_t> writes;
};

struct SimulatedDiskOptions {
  uint64_t seed = 1;
  // The bytes that Open(kCreate) can reserve in all files together.
  uint64_t capacity_bytes = std::numeric_limits<uint64_t>::max();
  // A call takes a time from this range, drawn at random: with a range, calls
  // end in another order than they began.
  uint64_t latency_us_min = 50;
  uint64_t latency_us_max = 50;
  // One call in this many is short, or ends with EINTR or EAGAIN; 0: none.
  uint64_t short_one_in = 0;
  uint64_t interrupted_one_in = 0;
  // Folders in which files can be.
  std::set<std::string> folders = {"/disk"};
};

// A disk in memory, which outlives the engines that use it. All that is random
// follows from the seed and the calls.
//
// Not thread-safe: a thread at a time uses the disk and its engines.
// Size: one short method for each fault that tests inject.
class SimulatedDisk {
 public:
  explicit SimulatedDisk(SimulatedDiskOptions options);

  void AddFault(SimulatedFault fault);
  void ClearFaults() { faults_.clear(); }
  // While the device is gone, all calls fail with ENODEV.
  void SetGone(bool gone) { gone_ = gone; }
  // Called at every event. It may read the disk and take crash states, and
  // change faults.
  void SetHook(std::function<void(const SimulatedEvent&)> hook) {
    hook_ = std::move(hook);
  }

  // The next calls change a file behind the engines' backs; it must exist.
  void Flip(const std::string& path, uint64_t offset, std::byte mask);
  void Truncate(const std::string& path, uint64_t bytes);
  void LoseFile(const std::string& path);

  bool Exists(const std::string& path) const { return files_.count(path) > 0; }
  // Reads what an engine would.
  std::vector<std::byte> Read(const std::string& path, uint64_t offset,
                              uint64_t bytes) const;

  // Returns a disk as it may be after a power cut, without faults, hook and
  // locks. `choose` returns, of each sector with writes that were not synced,
  // which is on the medium: 0 for what the last sync left, n for the nth of
  // CrashSector::writes. This disk and its engines stay as they are.
  using CrashChoice = absl::FunctionRef<int(const CrashSector&)>;
  std::unique_ptr<SimulatedDisk> Crash(CrashChoice choose) const;
  // Chooses by a seed: all old, all new, whole writes, the writes up to a point
  // with the last one torn, or each sector by itself.
  std::unique_ptr<SimulatedDisk> CrashAtRandom(uint64_t seed) const;
  // Visits all choices, `limit` at most, each once. Returns whether these were
  // all.
  bool ForEachCrash(
      uint64_t limit,
      absl::FunctionRef<void(std::unique_ptr<SimulatedDisk>)> visit) const;
  // Returns the disk after the engines' process was killed: what was not synced
  // is still to be, calls under way have had an effect on any of their sectors.
  // Without faults, hook and locks.
  std::unique_ptr<SimulatedDisk> AfterKill(uint64_t seed) const;

 private:
  friend class SimulatedIoEngine;

  struct File {
    explicit File(uint64_t bytes) : content(bytes) {}
    explicit File(SimulatedFile file) : content(std::move(file)) {}

    SimulatedFile content;
    std::vector<Extent> locked;
  };
  // A call between its begin and its end.
  struct Call {
    IoRequest::Kind kind = IoRequest::Kind::kRead;
    std::shared_ptr<File> file;
    std::string path;
    uint64_t offset = 0;
    absl::Span<std::byte> data;
    uint64_t sync_mark = 0;  // of a sync
    uint64_t number = 0;     // of all calls
    bool lose_sync = false;
    int64_t result = 0;
    uint64_t due_us = 0;
  };

  // The engine's side. Opening, removing and renaming are as IoEngine says.
  absl::StatusOr<std::shared_ptr<File>> Open(const std::string& path,
                                             uint64_t bytes,
                                             IoEngine::OpenMode mode);
  absl::StatusOr<std::shared_ptr<File>> OpenExtent(const std::string& device,
                                                   const Extent& extent);
  absl::Status Remove(const std::string& path);
  absl::Status Rename(const std::string& from, const std::string& to);
  // Begins a call, of which `kind` to `sync_mark` are given. Its result is
  // decided now, and takes effect in EndCall().
  Call BeginCall(Call call);
  // Ends a call and returns its result, bytes or a negative errno.
  int64_t EndCall(const Call& call);

  // Returns the fault of a call, if it has one now, and counts the call.
  std::optional<SimulatedFault> FaultOf(const Call& call);
  void ApplyFault(const SimulatedFault& fault, Call* call);
  void DisturbAtRandom(Call* call);
  void EndWrite(const Call& call);
  void EndSync(const Call& call);
  void Notify(SimulatedEvent::Kind kind, const std::string& path,
              uint64_t offset, uint64_t bytes, int64_t result) const;
  uint64_t UsedBytes() const;
  uint64_t Draw(uint64_t min, uint64_t max);
  std::shared_ptr<File> Find(const std::string& path) const;
  // Returns an equal disk without files.
  std::unique_ptr<SimulatedDisk> Successor(uint64_t seed) const;

  const SimulatedDiskOptions options_;
  std::mt19937_64 random_;
  std::map<std::string, std::shared_ptr<File>> files_;
  std::vector<SimulatedFault> faults_;
  std::function<void(const SimulatedEvent&)> hook_;
  bool gone_ = false;
  uint64_t calls_ = 0;
  uint64_t now_us_ = 0;
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_SIMULATED_DISK_H_
