#ifndef OPTSTATE_PROTO_SHM_SEGMENT_LAYOUT_H_
#define OPTSTATE_PROTO_SHM_SEGMENT_LAYOUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace optstate::shm {

// Two sealed segments and a file of the state carry a session over shared
// memory. Each is written by one process alone and mapped read-only by the
// other.
//
//   client segment (client writes)        completion segment (engine writes)
//   +---------------------------+         +-----------------------------+
//   | ClientHeader       4 KiB  |         | CompletionHeader     4 KiB  |
//   | Submission[kRingEntries]  |         | Completion[kRingEntries]    |
//   | CommitSettings, -Groups   |         | text[kRingEntries][512]     |
//   | load window  kWindowBytes |         | fetch window  kWindowBytes  |
//   | lead, gradient area       |         +-----------------------------+
//   +---------------------------+         parameter file (engine writes, one
//                                         per job): the parameter area
//
// All offsets are from the start of the segment; areas start at multiples of
// 4,096 bytes, but for the gradient area, which begins GradientLeadBytes(rank)
// behind one. Both sides compute the offsets from the layout (below); the
// header repeats the totals so that a mismatch is an error, not a surprise.

inline constexpr uint64_t kClientMagic = 0x31434c4354504f53;      // "SOPTCLC1"
inline constexpr uint64_t kCompletionMagic = 0x31504d4354504f53;  // "SOPTCMP1"
inline constexpr uint32_t kCompletionSegmentVersion = 2;
// The version that clients write since session protocol kGradientLeadProtocol;
// clients of older protocols write the version without a lead.
inline constexpr uint32_t kClientSegmentVersion = 3;
inline constexpr uint32_t kClientSegmentVersionWithoutLead = 2;
inline constexpr uint32_t kGradientLeadProtocol = 4;

inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint32_t kRingEntries = 1024;  // power of two
inline constexpr uint64_t kWindowBytes = 4 << 20;
inline constexpr uint64_t kTextBytes = 512;

// A ring's producer counts the entries that it has published in `tail`; the
// consumer counts the entries that it has taken in `head`, which lies in the
// consumer's own segment, because each side writes only memory that it created.
// Both only grow; entry i is at i % kRingEntries; tail - head <= kRingEntries.
// A sleeping consumer sets its `waiting` before it checks tail for the last
// time and waits on the 32-bit `doorbell` beside the producer's tail. The
// producer adds 1 to doorbell after each publication and wakes only when the
// other side is waiting (all seq_cst).
struct RingSide {
  alignas(64) std::atomic<uint64_t> produced_tail;  // of the ring that I write
  std::atomic<uint32_t> doorbell;                   // rung with produced_tail
  uint32_t reserved0;
  alignas(64) std::atomic<uint64_t> consumed_head;  // of the ring that I read
  std::atomic<uint32_t> waiting;  // 1: I am about to sleep on your doorbell
  // Ends a sleep without an entry, between threads of my own process. The peer
  // never reads it.
  std::atomic<uint32_t> interrupted;
};
static_assert(sizeof(RingSide) == 128);
static_assert(offsetof(RingSide, doorbell) == 8);
static_assert(offsetof(RingSide, consumed_head) == 64);
static_assert(offsetof(RingSide, waiting) == 72);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

struct ClientHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t group_count;
  uint64_t segment_bytes;
  uint64_t gradient_area_bytes;
  uint8_t layout_hash[32];
  uint8_t reserved[64];
  RingSide ring;
};
static_assert(sizeof(ClientHeader) == 256);
static_assert(offsetof(ClientHeader, layout_hash) == 32);
static_assert(offsetof(ClientHeader, ring) == 128);

struct CompletionHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved0;
  uint64_t segment_bytes;
  uint64_t parameter_area_bytes;
  uint8_t reserved[96];
  RingSide ring;
};
static_assert(sizeof(CompletionHeader) == 256);
static_assert(offsetof(CompletionHeader, ring) == 128);

enum class Op : uint16_t {
  kPush = 1,
  kCommit = 2,
  kAbort = 3,
  kBeginLoad = 4,
  kLoad = 5,
  kFinishLoad = 6,
  kFetch = 7,
  kParameterHint = 8,
  kDecide = 9,
};

// Flags of a Submission.
inline constexpr uint16_t kSubmissionFoundInf = 1;
inline constexpr uint16_t kSubmissionTwoPhase = 2;
inline constexpr uint16_t kSubmissionAwaitsNorm = 4;

// One request. The comment beside a field names the ops that use it; the other
// fields are 0.
struct Submission {
  uint16_t op;
  // commit; parameter_hint: v1::ParameterHint::Kind; decide: Verdict
  uint16_t flags;
  uint32_t micro_step;  // push; finish_load: begin_at_loads
  uint64_t request_id;  // grows by one with each submission of a session
  uint64_t step;  // push, commit, abort, decide; finish_load: begin_at_step
  uint32_t parameter;  // push, parameter_hint: first; load, fetch
  uint16_t array;      // load, fetch: v1::StateArray
  uint16_t dtype;      // load: DType of the window's elements
  // load, fetch: first element; finish_load, decide: the digest
  uint64_t begin;
  uint64_t numel;     // push, parameter_hint: parameters; else elements
  double grad_scale;  // commit; decide: the clip coefficient
  double max_norm;    // commit; decide: the gradient norm
};
static_assert(sizeof(Submission) == 64);
static_assert(offsetof(Submission, step) == 16);
static_assert(offsetof(Submission, begin) == 32);
static_assert(offsetof(Submission, max_norm) == 56);
static_assert(std::is_trivially_copyable_v<Submission>);

// The settings of a commit beside its Submission; written before the Submission
// is published, read once when it is taken.
struct CommitSettings {
  double max_value;
  double norm_type;
  uint64_t reserved[14];
};
static_assert(sizeof(CommitSettings) == 128);

// One group's hyperparameters in the order of proto/types/optimizer.cc.
struct CommitGroup {
  double value[12];
  double max_norm;
  uint32_t clips_with;  // see v1::GroupHyperparams
  uint32_t reserved0;
  uint64_t reserved[2];
};
static_assert(sizeof(CommitGroup) == 128);

// Flags of a Completion (commit).
inline constexpr uint32_t kCompletionApplied = 1;
inline constexpr uint32_t kCompletionFoundInf = 2;
inline constexpr uint32_t kCompletionPrepared = 4;
// The bits above the flags hold the loss scaler's hysteresis_left.
inline constexpr uint32_t kCompletionHysteresisShift = 8;

// One answer; every submission gets exactly one. The text (the status message,
// cut to kTextBytes) is in the text slot of the same index.
struct Completion {
  uint64_t request_id;
  uint32_t status;  // absl::StatusCode
  // The length of the text: that of an error, or, of a step that was answered,
  // the number (uint64) of the last step that survives a reboot, if any does.
  uint32_t text_bytes;
  uint64_t step;  // commit, fetch
  uint32_t flags;
  uint32_t good_steps;  // commit: see v1::LossScalerState
  double gradient_norm;
  double clip_coefficient;
  uint64_t update_ns;  // of a prepared step: its digest
  double loss_scale;
};
static_assert(sizeof(Completion) == 64);
static_assert(offsetof(Completion, gradient_norm) == 32);

constexpr uint64_t PageAlign(uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// The number of bytes before the gradient area of a rank's segment.
//
// The update sums the gradients of all ranks side by side, element by element.
// A first-level cache finds a line by its offset within a page, so areas that
// begin at the same offset compete for one set. tests/benchmarks/README.md has
// the gain of different offsets. 16 leads of four lines use the whole page.
constexpr uint64_t GradientLeadBytes(uint32_t rank) {
  return rank % 16 * (kPageBytes / 16);
}

// Offsets within the client segment.
struct ClientSegmentLayout {
  static constexpr uint64_t kRing = kPageBytes;
  static constexpr uint64_t kSettings =
      kRing + kRingEntries * sizeof(Submission);
  static constexpr uint64_t kGroups = kSettings + sizeof(CommitSettings);
  uint64_t load_window;
  uint64_t gradient_area;
  uint64_t segment_bytes;

  constexpr ClientSegmentLayout(uint64_t group_count,
                                uint64_t gradient_area_bytes,
                                uint64_t gradient_lead_bytes)
      : load_window(PageAlign(kGroups + group_count * sizeof(CommitGroup))),
        gradient_area(load_window + kWindowBytes + gradient_lead_bytes),
        segment_bytes(PageAlign(gradient_area + gradient_area_bytes)) {}

  // Where the first page with gradients begins; pages from here on may follow
  // the attach (v1::AttachRequest.pages_follow).
  constexpr uint64_t gradient_pages() const {
    return gradient_area / kPageBytes * kPageBytes;
  }
};

// Offsets within the completion segment.
struct CompletionSegmentLayout {
  static constexpr uint64_t kRing = kPageBytes;
  static constexpr uint64_t kText = kRing + kRingEntries * sizeof(Completion);
  static constexpr uint64_t kFetchWindow = kText + kRingEntries * kTextBytes;
  static constexpr uint64_t kSegmentBytes = kFetchWindow + kWindowBytes;
};
static_assert(CompletionSegmentLayout::kFetchWindow % kPageBytes == 0);

// The size in bytes of the parameter file for an area of this size (never 0).
constexpr uint64_t ParameterSegmentBytes(uint64_t parameter_area_bytes) {
  return PageAlign(parameter_area_bytes == 0 ? 1 : parameter_area_bytes);
}

// The size in bytes of the file of run stamps, one per run (never 0).
constexpr uint64_t RunStampsBytes(uint64_t run_count) {
  const uint64_t bytes = run_count * sizeof(uint64_t);
  return bytes < kPageBytes ? kPageBytes : bytes;
}

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_SEGMENT_LAYOUT_H_
