#ifndef OPTSTATE_STORAGE_SWAP_STATE_H_
#define OPTSTATE_STORAGE_SWAP_STATE_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace optstate::storage {

// Counts the I/O and the CPU time of one pass over the records.
struct PassCounters {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t cpu_ns = 0;
  uint64_t elapsed_ns = 0;
  uint64_t waited_ns = 0;  // in which some thread waited for a record of a pass
};

// Counts the work of a store with records on disk since it was opened.
struct SwapCounters {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t records_read = 0;
  uint64_t records_written = 0;
  uint64_t commits = 0;
  uint64_t passes = 0;  // begun
  // CPU time of the thread of I/O, and of checksums on the threads that use
  // the store. Threads of a blocking engine, or of the kernel, are not in it.
  uint64_t cpu_ns = 0;
  // From the beginning of the pass before the present one to its end, which
  // is the beginning of this one.
  PassCounters last_pass;
};

// Counts what one directory's files did in a pass.
struct DirectoryPass {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t busy_ns = 0;
};

// Counts the requests to the files of one directory since the store was opened.
// Bytes and operations are those that succeeded.
struct DirectoryCounters {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t reads = 0;
  uint64_t writes = 0;
  uint64_t syncs = 0;
  uint64_t errors = 0;       // each attempt of a read by itself
  uint64_t queue_depth = 0;  // requests that are under way now
  uint64_t busy_ns = 0;      // in which some request was under way
  DirectoryPass last_pass;   // as SwapCounters::last_pass
};

// Counts what was asked of a cache of parameters since the store was opened, by
// the parts of parameters that lie in one record each.
struct ParameterCacheCounters {
  uint64_t from_frames = 0;  // fetched: the record was in memory
  uint64_t hits = 0;         // fetched: the cache had it, or was reading it
  uint64_t misses = 0;       // fetched: read from disk for that
  uint64_t prefetched = 0;   // taken to be read ahead
  uint64_t refused = 0;      // prefetches for which there was no room
};

// The parameters of a store whose records hold them.
struct ParameterCacheState {
  uint64_t bytes = 0;
  ParameterCacheCounters counters;
};

// How a store that has records on disk is doing.
struct SwapState {
  const char* io_engine = "";  // its name
  SwapCounters counters;
  std::vector<DirectoryCounters> directories;  // in the order of the job's
  // Counts records that are still to be written for a commit that is under
  // way, or before frames are given up; 0: neither waits for a record.
  uint64_t records_to_write = 0;
  // Absent where parameters are in memory.
  std::optional<ParameterCacheState> parameter_cache;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_SWAP_STATE_H_
