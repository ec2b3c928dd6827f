#ifndef OPTSTATE_STORAGE_RECORD_LAG_H_
#define OPTSTATE_STORAGE_RECORD_LAG_H_

#include "proto/types/sub_groups.h"
#include "storage/record_view.h"

namespace optstate::storage {

// Says which records of a store lag behind copies of them elsewhere, and brings
// them up to date.
//
// Threads: thread-safe.
class RecordLag {
 public:
  // Says whether MakeCurrent() has anything to do for the record.
  virtual bool Concerns(const SubGroup& sub_group, bool is_written) = 0;
  // Returns once the record, which is pinned for writing, is as new as any copy
  // of it. With `is_written` it is the only one from then on.
  virtual void MakeCurrent(const RecordView& record, bool is_written) = 0;

 protected:
  ~RecordLag() = default;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_RECORD_LAG_H_
