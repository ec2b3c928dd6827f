#ifndef OPTSTATE_STORAGE_IO_REQUEST_RULES_H_
#define OPTSTATE_STORAGE_IO_REQUEST_RULES_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "storage/io/io_engine.h"

// Rules of all engines: which requests are legal, and what the result of a call
// means for a request.
namespace optstate::io {

// Stops the process, with the reason, unless `condition` holds: the caller has
// a bug, and going on could write to the wrong place.
void CheckOrDie(bool condition, absl::string_view reason);

// Checks a request before it is queued: offset, size and buffer are multiples
// of kSectorBytes, a sync has neither, a write stays inside `range`, all of the
// file or the extent of the device.
void CheckRequest(const IoRequest& request, const Extent& range);

// Checks memory given to RegisterMemory().
void CheckMemory(absl::Span<const std::byte> memory);

// Turns errno of a call on the file at `path` into a status with the codes of
// IoRequest::status, and says what to do: see file_error.h. `bytes_needed`:
// that the call was to bring to the file system, for an error of one that is
// full.
absl::Status IoError(int error_number, absl::string_view what,
                     const std::string& path, uint64_t bytes_needed = 0);

// The rest of a request, which its next call is to transfer.
struct RequestRest {
  uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  uint64_t bytes = 0;
};
RequestRest RestOf(const IoRequest& request);

enum class CallOutcome : uint8_t {
  kDone,   // the request's status is set
  kAgain,  // the rest of the request needs another call
};
// Takes the result of a call for the rest of a request, bytes or a negative
// errno, into account. `path` is for the message.
CallOutcome TakeResult(int64_t result, const std::string& path,
                       IoRequest* request);

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_REQUEST_RULES_H_
