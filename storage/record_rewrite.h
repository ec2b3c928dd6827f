#ifndef OPTSTATE_STORAGE_RECORD_REWRITE_H_
#define OPTSTATE_STORAGE_RECORD_REWRITE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "storage/arrangement.h"

namespace optstate::storage {

// The arrangement and the layout for which a job's records are written anew.
struct RewriteTarget {
  // The layout is the job's, or extends it. All that is pointed to outlives the
  // use of this.
  const Layout* layout = nullptr;
  uint64_t sub_group_elements = 0;
  // Its number is that of the present arrangement plus 1.
  Arrangement arrangement;
  // The text of the last durable commit as the new arrangement has it; of a job
  // without one it is not used. `job_bytes` is the room for later ones. Of a
  // move both are read by FinishMove(), for commits go on until then.
  std::string job;
  uint64_t job_bytes = 0;
  // A frame table of zeros (SwapSizes::table), to which the next one is
  // written.
  absl::Span<std::byte> table;
};

// How far the records of a store have been written anew.
struct RewriteState {
  uint64_t bytes = 0;        // written
  uint64_t bytes_total = 0;  // 0: not known yet
  absl::Duration elapsed = absl::ZeroDuration();
  bool is_move = false;  // steps go on meanwhile
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_RECORD_REWRITE_H_
