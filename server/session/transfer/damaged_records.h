#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_DAMAGED_RECORDS_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_DAMAGED_RECORDS_H_

#include <cstddef>
#include <set>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "storage/format/load_log.h"
#include "storage/state_store.h"

namespace optstate::session {

// Records that their disk has damaged get new values from a load, which has to
// have all of them: no element of such a record can be kept.

// Returns DATA_LOSS, naming the first of these sub-groups of which the load
// leaves out an element of any array.
absl::Status CheckReplaced(const std::set<size_t>& damaged,
                           const storage::StateStore& store,
                           absl::Span<const storage::LoadLogRecord> load);

// Returns the ABORTED of a load that cannot replace a record, because the
// record had a part of its values when that part came, and was found damaged
// later. The same load made again has nothing to leave out there.
absl::Status LeftOutOfDamaged(const absl::Status& damage);

// Reads those of the records `left_out` that the load changes. Returns the
// status above when one of them is damaged, or another error of the store.
absl::Status CheckLeftOut(const std::set<size_t>& left_out,
                          storage::StateStore* store,
                          absl::Span<const storage::LoadLogRecord> load);

// Makes the damaged records of a load usable, so that it can be written to
// them; they are zeros until it is, and are added to `replaced`. Returns
// DATA_LOSS when the load does not replace one of them, or another error of the
// store.
absl::Status ReplaceDamaged(storage::StateStore* store,
                            absl::Span<const storage::LoadLogRecord> load,
                            std::set<size_t>* replaced);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_DAMAGED_RECORDS_H_
