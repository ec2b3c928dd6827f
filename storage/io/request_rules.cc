#include "storage/io/request_rules.h"

#include <cerrno>
#include <cstdlib>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "storage/io/file_error.h"

namespace optstate::io {
namespace {

// The smallest logical block of a disk. A call that ends early ends at a
// multiple of it, unless the file ends there.
constexpr int64_t kBlockBytes = 512;

bool IsAligned(uint64_t value) { return value % kSectorBytes == 0; }

const char* CallName(IoRequest::Kind kind) {
  switch (kind) {
    case IoRequest::Kind::kRead:
      return "read";
    case IoRequest::Kind::kWrite:
      return "write";
    case IoRequest::Kind::kSync:
      return "fdatasync";
  }
  return "?";
}

std::string Describe(const IoRequest& request, const std::string& path) {
  if (request.kind == IoRequest::Kind::kSync) {
    return absl::StrCat("fdatasync of ", path);
  }
  return absl::StrCat(CallName(request.kind), " of ", request.buffer.size(),
                      " bytes at ", request.offset_bytes, " of ", path);
}

// Returns the status of a call that transferred nothing more, although it
// succeeded.
absl::Status EndedEarly(const IoRequest& request, const std::string& path) {
  return absl::DataLossError(
      absl::StrCat(Describe(request, path),
                   request.kind == IoRequest::Kind::kRead
                       ? ": the file ends before that, after "
                       : ": the disk takes no more, after ",
                   request.done_bytes, " of these bytes"));
}

}  // namespace

void CheckOrDie(bool condition, absl::string_view reason) {
  if (condition) return;
  std::cerr << "storage/io: " << reason << std::endl;
  std::abort();
}

void CheckRequest(const IoRequest& request, const Extent& range) {
  const uint64_t size = request.buffer.size();
  CheckOrDie(static_cast<int>(request.priority) < kIoPriorityCount,
             "a request has no such priority");
  if (request.kind == IoRequest::Kind::kSync) {
    CheckOrDie(size == 0 && request.offset_bytes == 0,
               "a sync has an offset or a buffer");
    return;
  }
  CheckOrDie(size > 0, "a request has no buffer");
  CheckOrDie(IsAligned(size) && IsAligned(request.offset_bytes) &&
                 IsAligned(reinterpret_cast<uintptr_t>(request.buffer.data())),
             "a request's offset, size or buffer is not a multiple of "
             "kSectorBytes");
  CheckOrDie(request.kind == IoRequest::Kind::kRead ||
                 (request.offset_bytes >= range.begin_bytes &&
                  request.offset_bytes <= range.end_bytes() &&
                  size <= range.end_bytes() - request.offset_bytes),
             "a write goes past the end of its file or extent");
}

void CheckMemory(absl::Span<const std::byte> memory) {
  CheckOrDie(IsAligned(reinterpret_cast<uintptr_t>(memory.data())) &&
                 IsAligned(memory.size()),
             "registered memory does not begin and end at a multiple of "
             "kSectorBytes");
}

absl::Status IoError(int error_number, absl::string_view what,
                     const std::string& path, uint64_t bytes_needed) {
  absl::Status status = FileError(error_number, what, path, bytes_needed);
  switch (error_number) {
    case EIO:
    case ENODATA:    // the disk cannot read a block any more
    case EREMOTEIO:  // an error of the device's own
    case EUCLEAN:    // the file system is damaged
    case EBADMSG:    // a checksum of the file system
    case EILSEQ:     // protection information of the disk
      return absl::DataLossError(status.message());
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(status.message());
    case ENODEV:
    case ENXIO:
    case ESHUTDOWN:  // ext4 after a forced shutdown
    case EROFS:      // remounted after an error
    case ENOLINK:    // an error of the way to the device
    case ETIMEDOUT:
      return absl::UnavailableError(status.message());
    default:
      return status;
  }
}

RequestRest RestOf(const IoRequest& request) {
  return {.offset_bytes = request.offset_bytes + request.done_bytes,
          .data = request.buffer.data() + request.done_bytes,
          .bytes = request.buffer.size() - request.done_bytes};
}

CallOutcome TakeResult(int64_t result, const std::string& path,
                       IoRequest* request) {
  // ECANCELED: the thread that gave the request to the ring has ended, and the
  // kernel gave the request up before it began. A sync that did begin tells of
  // a lost write once, and its repetition would succeed.
  const bool may_have_begun = result == -EINTR || result == -EAGAIN;
  if (result == -ECANCELED ||
      (may_have_begun && request->kind != IoRequest::Kind::kSync)) {
    return CallOutcome::kAgain;
  }
  if (result < 0) {
    request->status =
        IoError(static_cast<int>(-result), Describe(*request, path), path,
                RestOf(*request).bytes);
    return CallOutcome::kDone;
  }
  if (request->kind == IoRequest::Kind::kSync) {
    request->status = absl::OkStatus();
    return CallOutcome::kDone;
  }
  const uint64_t progress =
      static_cast<uint64_t>(result - result % kBlockBytes);
  if (progress == 0) {
    request->status = EndedEarly(*request, path);
    return CallOutcome::kDone;
  }
  request->done_bytes += progress;
  CheckOrDie(request->done_bytes <= request->buffer.size(),
             "the kernel transferred more than it was asked for");
  if (request->done_bytes < request->buffer.size()) return CallOutcome::kAgain;
  request->status = absl::OkStatus();
  return CallOutcome::kDone;
}

}  // namespace optstate::io
