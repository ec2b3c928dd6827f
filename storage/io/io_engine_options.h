#ifndef OPTSTATE_STORAGE_IO_IO_ENGINE_OPTIONS_H_
#define OPTSTATE_STORAGE_IO_IO_ENGINE_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/time/time.h"
#include "storage/io/io_hook.h"

namespace optstate::io {

// Settings of the engines of a real disk.
struct IoEngineOptions {
  // The most requests that are with the kernel at once; at least 1.
  int queue_depth = 64;
  // The threads of the blocking engine, which needs one for each request that
  // is to be with the kernel; at least 1. More than queue_depth are not
  // started.
  int threads = 4;
  // io_uring: a thread of the kernel takes requests without a system call. It
  // spins on a core while there is work and for a second after it.
  bool submission_thread = false;
  // io_uring: registered memory is given to the kernel in pieces of this size,
  // because it takes no more than 1 GiB at once. A multiple of kSectorBytes.
  uint64_t registered_piece_bytes = uint64_t{1} << 30;
  // The time for which Open() waits for another engine's lock.
  absl::Duration lock_wait = absl::Seconds(5);
  // Gets a sentence about what the engine does without, and why: at most once
  // for each such thing, on the thread that calls the engine. May be empty.
  std::function<void(const std::string&)> log;
  // A test's hook into the calls; null otherwise. Outlives the engine.
  IoHook* hook = nullptr;
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_IO_ENGINE_OPTIONS_H_
