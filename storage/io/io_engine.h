#ifndef OPTSTATE_STORAGE_IO_IO_ENGINE_H_
#define OPTSTATE_STORAGE_IO_IO_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace optstate::io {

// Offsets, sizes and buffers of requests are multiples of it. It is the largest
// logical block of the disks that are in use.
inline constexpr uint64_t kSectorBytes = 4096;

// The class of a request. Requests that wait are begun in this order; those of
// one class, in the order in which they were submitted.
enum class IoPriority : uint8_t { kSwapIn, kSwapOut, kBackground };
inline constexpr int kIoPriorityCount = 3;

// An open file of an engine.
struct FileId {
  int index = -1;
};

// A part of a device. Begins and ends at a multiple of kSectorBytes.
struct Extent {
  uint64_t begin_bytes = 0;
  uint64_t bytes = 0;

  uint64_t end_bytes() const { return begin_bytes + bytes; }
  bool operator==(const Extent&) const = default;
};

// One read, write or sync. The caller owns it and its buffer, and leaves both
// alone from Submit() until Poll() returns it.
struct IoRequest {
  enum class Kind : uint8_t {
    kRead,
    kWrite,
    // Makes durable all writes to the file that were completed before Submit().
    kSync,
  };

  Kind kind = Kind::kRead;
  IoPriority priority = IoPriority::kSwapIn;
  FileId file;
  uint64_t offset_bytes = 0;
  absl::Span<std::byte> buffer;  // empty for kSync

  // Set when Poll() returns the request. DATA_LOSS: the disk refused the call
  // (EIO), or the file is shorter than it was. RESOURCE_EXHAUSTED: no space
  // (ENOSPC, EDQUOT, EFBIG). UNAVAILABLE: the device is gone, or its file
  // system has become read-only. The message names the call, the file and the
  // offset. After an error of a write, any part of it may have been written.
  absl::Status status;

  // The engine's own.
  IoRequest* next = nullptr;
  uint64_t done_bytes = 0;
  // That of an engine which measures requests; 0: it does not.
  int64_t submitted_ns = 0;
};

// Reads and writes files without a thread that waits for each request.
//
// A request is done whole or has an error: short reads and writes are resumed,
// and EINTR and EAGAIN are repeated. Nothing else is: above all, a failed sync
// is never repeated, for the kernel may have dropped the pages that it could
// not write.
// Order: none. Two requests that overlap must not be under way at once.
// Checks: a request that is not aligned, names no open file, or would write
// outside its file or extent, stops the process: the caller has a bug.
// Bounds: at most Options::queue_depth requests are with the kernel; the others
// wait in the engine, linked through `next`. Submit and Poll allocate nothing,
// but for the message of an error.
//
// Threads: one thread at a time calls all methods but Wake(), which any may
// call. Destroying the engine waits for the requests that the kernel has, drops
// the others, and closes the files; no buffer is touched afterwards.
class IoEngine {
 public:
  enum class OpenMode : uint8_t {
    // The file must not exist. All its bytes are reserved (ENOSPC comes now and
    // not later) and zero, and its name is durable when Open returns. After a
    // crash before that, the name may be there, of a file of any size.
    kCreate,
    // The file must exist and have at least this many bytes.
    kOpen,
  };

  virtual ~IoEngine() = default;

  // Opens a file, past the page cache where the file system can do that.
  // RESOURCE_EXHAUSTED: there is no space, with the bytes needed and left;
  // ALREADY_EXISTS; NOT_FOUND: the file, or with kCreate its folder, does not
  // exist; DATA_LOSS: the file is shorter. An error leaves no new file behind.
  // The file is locked (flock) until the last request of the last engine that
  // has it is over, also when that engine's process was killed: Open waits up
  // to a few seconds for such a lock, then returns UNAVAILABLE with the path.
  virtual absl::StatusOr<FileId> Open(const std::string& path, uint64_t bytes,
                                      OpenMode mode) = 0;
  // Opens a part of a block device, or of a file that stands for one, past the
  // page cache. Offsets of requests are those of the device, and a write stays
  // inside the extent. Engines share a device: only the extent is locked, in
  // the way of a file in Open(). NOT_FOUND: there is no such device;
  // FAILED_PRECONDITION: it is neither a block device nor a file; DATA_LOSS: it
  // ends before the extent; UNAVAILABLE: another engine has a part of the
  // extent.
  virtual absl::StatusOr<FileId> OpenExtent(const std::string& device,
                                            const Extent& extent) = 0;
  // Closes a file that no request names.
  virtual void Close(FileId file) = 0;
  // Removes a file that is not open; its absence is durable on return.
  // NOT_FOUND: there is none.
  virtual absl::Status Remove(const std::string& path) = 0;
  // Gives a file another name in its folder, in place of the file that has that
  // name, if there is one; neither is open. The name is durable on return, also
  // one that the file has already; a power cut before that leaves either the
  // former names or the new one. NOT_FOUND: there is no such file.
  virtual absl::Status Rename(const std::string& from,
                              const std::string& to) = 0;

  // Tells the engine that requests will have their buffers in `memory`, which
  // it may then pin for the device: all of it takes memory from then on, so its
  // blocks have to be reserved. Begins and ends at a multiple of kSectorBytes.
  // Called while no request is under way; memory given before is let go, and
  // empty memory is none. What was given last outlives the engine. Requests
  // with other buffers work too.
  virtual void RegisterMemory(absl::Span<std::byte> memory) = 0;

  // Queues a request. The kernel gets it at the next Poll() at the latest, and
  // one for which there is no room at a later one.
  virtual void Submit(IoRequest* request) = 0;
  // Writes completed requests to `completed` (not empty) and returns how many.
  // With
  // `wait`, returns when there is at least one, or Wake() was called since the
  // last Poll(), or no request is under way.
  virtual size_t Poll(absl::Span<IoRequest*> completed, bool wait) = 0;
  // Makes a present or the next Poll() return.
  virtual void Wake() = 0;

  // Returns the number of requests that Poll() has not returned.
  virtual size_t in_flight() const = 0;
  // Returns "io_uring", "blocking" or "simulated".
  virtual const char* name() const = 0;
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_IO_ENGINE_H_
