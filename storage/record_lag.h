#ifndef OPTSTATE_STORAGE_RECORD_LAG_H_
#define OPTSTATE_STORAGE_RECORD_LAG_H_

#include "proto/types/sub_groups.h"

namespace optstate::storage {

// Says which records in memory lag behind copies of them elsewhere, and brings
// them up to date.
//
// Threads: thread-safe.
class RecordLag {
 public:
  // Returns once the record of the sub-group is as new as any copy of it. With
  // `is_written` it is the only one from then on.
  virtual void MakeCurrent(const SubGroup& sub_group, bool is_written) = 0;

 protected:
  ~RecordLag() = default;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_RECORD_LAG_H_
