#ifndef OPTSTATE_STORAGE_FORMAT_CONTROL_FILE_H_
#define OPTSTATE_STORAGE_FORMAT_CONTROL_FILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace optstate::storage {

// The `control` file of a job, mapped shared and written in place by its one
// engine. Byte by byte: FORMAT.md.
//
// The file withstands the death of the process at any instruction. Memory then
// holds exactly the stores that were executed, in program order for any later
// reader, so a record is written whole into the slot that is not current
// and becomes current by one 8-byte store. It does not withstand a power cut:
// on a file system with a disk below, pages reach it in any order.

inline constexpr uint64_t kControlMagic = 0x314c544354504f53;  // "SOPTCTL1"
inline constexpr uint32_t kControlVersion = 7;
// The version while records in memory may lag behind copies on devices, so that
// what is in `gradient_log` counts: an older build must not go on with them.
inline constexpr uint32_t kControlVersionLagging = 8;
// The version when that log has sums of several ranks' gradients.
inline constexpr uint32_t kControlVersionLaggingSums = 9;

// Flags of a StepRecord.
inline constexpr uint32_t kStepRecordHasOutcome = 1;
inline constexpr uint32_t kStepRecordApplied = 2;
inline constexpr uint32_t kStepRecordFoundInf = 4;
// In an intent alone: the node's own norms clip some gradients.
inline constexpr uint32_t kStepRecordClipped = 8;
// Likewise: it is committed only once the norm of all nodes is noted.
inline constexpr uint32_t kStepRecordAwaitsNorm = 16;

inline constexpr uint32_t kNoParameter = UINT32_MAX;
// The number of masters that a load of former engines overwrote at a time.
inline constexpr size_t kLoadBlockElements = 256;

// The job between two steps.
struct StepRecord {
  uint64_t committed_step;
  int64_t committed_at_ns;  // since the Unix epoch; 0: never
  uint64_t commit_digest;   // of the commit that led here
  double gradient_norm;
  double clip_coefficient;
  uint64_t update_ns;
  uint32_t flags;
  // Parameters [load_required_from, count) have no valid state yet: they must
  // be loaded before a step. The count itself when there are none, so that
  // those which an extension of the layout brings are required at once.
  uint32_t load_required_from;
  // The state has been, or is being, overwritten from this parameter on: by a
  // load of parameters that have no valid state yet, which must be repeated
  // when it is interrupted, or by one whose log is sealed, which is finished.
  // kNoParameter: none.
  uint32_t load_touched_from;
  // The state of LossScaler for the next step, of jobs that have one.
  uint32_t good_steps;  // without overflow since the scale changed
  double loss_scale;
  uint32_t hysteresis_left;  // overflows that the scale still bears
  uint32_t loads_finished;   // loads that all ranks have finished, modulo 2^32
  // The seal of the file `load`, see LoadIsSealed(): what the file must have.
  uint64_t load_log_bytes;
  // The sequence number of the record that sealed the file; 0: none did.
  uint64_t load_log_sequence;
  uint32_t load_log_crc32c;
  uint32_t reserved0;
  // Identifies what was prepared; 0: the step was taken in one phase.
  uint64_t prepared_digest;
  uint32_t reserved1[3];
  uint32_t crc32c;  // of the bytes before it
};
static_assert(sizeof(StepRecord) == 128);
static_assert(offsetof(StepRecord, gradient_norm) == 24);
static_assert(offsetof(StepRecord, flags) == 48);
static_assert(offsetof(StepRecord, load_touched_from) == 56);
static_assert(offsetof(StepRecord, loss_scale) == 64);
static_assert(offsetof(StepRecord, loads_finished) == 76);
static_assert(offsetof(StepRecord, load_log_bytes) == 80);
static_assert(offsetof(StepRecord, prepared_digest) == 104);
static_assert(offsetof(StepRecord, crc32c) == 124);
static_assert(std::is_trivially_copyable_v<StepRecord>);

struct ControlFile {
  uint64_t magic;
  uint32_t version;
  uint32_t header_crc32c;  // of magic, version, incarnation, created_at_ns
  uint64_t incarnation;    // equals that of job.binpb
  int64_t created_at_ns;
  uint8_t reserved0[32];
  // The current record is records[sequence % 2].
  alignas(64) std::atomic<uint64_t> sequence;
  // The step whose tiles are being written; 0: none. Set before the first tile
  // is touched, cleared after the record of that step is current.
  std::atomic<uint64_t> step_in_progress;
  // The progress of the step in progress, once all its tiles are written: the
  // counts of the parameters before counts_begun - 1 are those after the step,
  // that of counts_begun - 1 may be either; its old one is
  // count_before[(counts_begun - 1) % 2]. Zeroed before step_in_progress is
  // set.
  std::atomic<uint64_t> counts_begun;
  int64_t count_before[2];
  double scalar_before[2];  // likewise, of optimizers that have one
  // The steps recovered since the job was made, for operators and tests.
  uint64_t steps_recovered;
  uint64_t runs_rolled_back;
  // The step that is speculated about; 0: none. Set before the first of its
  // runs is touched. When it is the committed step or one before, it is
  // decided.
  std::atomic<uint64_t> step_speculated;
  // Only engines before staged loads set this: 1 + the parameter of which a
  // load is overwriting the masters of elements [loading_begin,
  // +loading_numel): half of a master may be written, or not yet the parameter
  // beside it. They are to become `loading_masters`. 0: none.
  std::atomic<uint64_t> parameter_loading;
  uint64_t loading_begin;
  uint64_t loading_numel;
  // The step in progress, once gradients that it needs are lost, and the rank
  // that they were from (stored before): the step cannot be finished any more.
  // Else 0, or a step that was committed since.
  std::atomic<uint64_t> step_given_up;
  uint64_t given_up_for_rank;
  // The least size of the file undo, for its size alone does not show that it
  // was cut; 0: not known, of an engine that did not say.
  uint64_t undo_bytes;
  alignas(64) StepRecord records[2];
  float loading_masters[kLoadBlockElements];
  // The step whose intent is written and whose verdict is awaited; none of its
  // tiles is touched. 0, or a step that is in progress or committed: none.
  std::atomic<uint64_t> step_prepared;
  // The step that has a norm of all nodes, which replaces the one in the
  // intent, and what its gradients are multiplied by beside the intent's
  // factors. Stored while the step is prepared, and cleared before an intent is
  // written. 0, or another step: the intent's count.
  std::atomic<uint64_t> step_clipped;
  double nodes_gradient_norm;
  double nodes_clip_coefficient;
  uint8_t reserved2[2592];
};
static_assert(sizeof(ControlFile) == 4096);
static_assert(offsetof(ControlFile, incarnation) == 16);
static_assert(offsetof(ControlFile, sequence) == 64);
static_assert(offsetof(ControlFile, step_in_progress) == 72);
static_assert(offsetof(ControlFile, counts_begun) == 80);
static_assert(offsetof(ControlFile, step_given_up) == 168);
static_assert(offsetof(ControlFile, undo_bytes) == 184);
static_assert(offsetof(ControlFile, records) == 192);
static_assert(offsetof(ControlFile, loading_masters) == 448);
static_assert(offsetof(ControlFile, step_prepared) == 1472);
static_assert(offsetof(ControlFile, step_clipped) == 1480);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Makes a zeroed file the control file of a new job with this record.
void InitControlFile(uint64_t incarnation, int64_t created_at_ns,
                     const StepRecord& record, ControlFile* control);

// Returns DATA_LOSS on a wrong magic, version, header checksum or incarnation,
// a current record whose checksum or marks are wrong, or a field that a job
// with this many parameters cannot have; says what was expected and found.
absl::Status CheckControlFile(const ControlFile& control, uint64_t incarnation,
                              uint64_t parameter_count);

// Checks header and current record alone: what can be asked of a copy that was
// taken while an engine may have been writing.
absl::Status CheckCurrentRecord(const ControlFile& control,
                                uint64_t incarnation);

const StepRecord& CurrentRecord(const ControlFile& control);

// Says what `gradient_log` has of records that lag behind copies on devices.
enum class Lag : uint8_t {
  kNone,  // no record lags
  kGradients,
  kSums,  // of several ranks' gradients
};
// Returns whether records in memory may lag, and says so, in one store.
bool MayLag(const ControlFile& control);
void SetLag(Lag lag, ControlFile* control);

// Returns whether a load has all of its ranks' data in the file `load` and is
// to be applied, as often as need be: from SealLoad until the next record.
// False after an engine that knows nothing of such files, which takes the
// record for that of a load that was interrupted.
bool LoadIsSealed(const ControlFile& control);

// Makes `record` the current one. May be called by one thread at a time. Never
// fails.
void PublishRecord(StepRecord record, ControlFile* control);

// Publishes the record of a load whose log has these bytes and this checksum
// and which overwrites parameters from `touched_from` on.
void SealLoad(uint64_t bytes, uint32_t crc32c, uint32_t touched_from,
              ControlFile* control);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_FORMAT_CONTROL_FILE_H_
