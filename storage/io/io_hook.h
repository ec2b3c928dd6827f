#ifndef OPTSTATE_STORAGE_IO_IO_HOOK_H_
#define OPTSTATE_STORAGE_IO_IO_HOOK_H_

#include <cstdint>

#include "storage/io/io_engine.h"

namespace optstate::io {

// Stands between an engine and the kernel, so that a test can make calls short
// or fail, and count them. No other code sets one.
//
// Threads: the blocking engine calls it from all of its threads at once.
class IoHook {
 public:
  virtual ~IoHook() = default;
  // Called before each call of a request. Returns how many of the next `bytes`
  // bytes to ask for: a multiple of 512, at least 512 of a read or write.
  virtual uint64_t OnBegin(const IoRequest& /*request*/, uint64_t bytes) {
    return bytes;
  }
  // Called with the result of each call, a number of bytes or a negative errno.
  // The engine goes by what it returns.
  virtual int64_t OnEnd(const IoRequest& /*request*/, int64_t result) {
    return result;
  }
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_IO_HOOK_H_
