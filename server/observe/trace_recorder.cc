#include "server/observe/trace_recorder.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "server/observe/trace_lanes.h"

namespace optstate::observe {
namespace {

// Returns the largest power of two that is not above `n`; `n` > 0.
size_t PowerOfTwo(size_t n) {
  size_t power = 1;
  while (power <= n / 2) power *= 2;
  return power;
}

}  // namespace

TraceSource::TraceSource(TraceRecorder* recorder,
                         std::function<LaneName(uint32_t lane)> name_lane)
    : recorder_(*recorder), name_lane_(std::move(name_lane)) {
  recorder_.Add(this);
}

TraceSource::~TraceSource() { recorder_.Remove(this); }

// The order of the four accesses (all of them sequentially consistent, as those
// in TakeRing) closes the race with the end of a trace: this thread either
// finds no ring any more, or is seen to be in one.
void TraceSource::Record(const Span& span) {
  is_recording_.store(true, std::memory_order_seq_cst);
  SpanRing* const ring = ring_.load(std::memory_order_seq_cst);
  if (ring != nullptr && !ring->Push(span)) {
    lost_.fetch_add(1, std::memory_order_relaxed);
  }
  is_recording_.store(false, std::memory_order_seq_cst);
}

TraceRecorder::TraceRecorder() = default;
TraceRecorder::~TraceRecorder() = default;

void TraceRecorder::Add(TraceSource* source) {
  const absl::MutexLock lock(&mu_);
  sources_.push_back(source);
  if (is_under_way_) GiveRing(source);
}

void TraceRecorder::Remove(TraceSource* source) {
  const absl::MutexLock lock(&mu_);
  if (is_under_way_) {
    Drain(source, left_.get());
    Span dropped;
    while (source->own_ring_->Pop(&dropped)) {
      left_->set_lost_spans(left_->lost_spans() + 1);
    }
  }
  TakeRing(source);
  std::erase(sources_, source);
}

void TraceRecorder::GiveRing(TraceSource* source) {
  source->families_.clear();
  source->lost_.store(0, std::memory_order_relaxed);
  source->own_ring_ = std::make_unique<SpanRing>(ring_spans_);
  source->ring_.store(source->own_ring_.get(), std::memory_order_seq_cst);
}

void TraceRecorder::TakeRing(TraceSource* source) {
  source->ring_.store(nullptr, std::memory_order_seq_cst);
  while (source->is_recording_.load(std::memory_order_seq_cst)) {
    ::sched_yield();
  }
  source->own_ring_ = nullptr;
}

absl::Status TraceRecorder::Begin(uint32_t steps) {
  const absl::MutexLock lock(&mu_);
  if (is_under_way_) {
    return absl::FailedPreconditionError(
        "another trace of the job is under way: wait for its end, or end it");
  }
  is_under_way_ = true;
  steps_max_ = steps;
  const size_t sources = std::max<size_t>(sources_.size(), 1);
  ring_spans_ = PowerOfTwo(std::clamp(kRingsBytesMax / sizeof(Span) / sources,
                                      kRingSpansMin, kRingSpansMax));
  lanes_ = std::make_unique<TraceLanes>();
  left_ = std::make_unique<v1::TraceChunk>();
  for (TraceSource* const source : sources_) GiveRing(source);
  epoch_ns_ = TraceNowNs();
  began_at_ns_ = absl::ToUnixNanos(absl::Now());
  return absl::OkStatus();
}

void TraceRecorder::Arm() {
  step_.store(0, std::memory_order_relaxed);
  has_step_.store(false, std::memory_order_relaxed);
  turns_.store(0, std::memory_order_relaxed);
  steps_.store(0, std::memory_order_relaxed);
  first_ns_.store(0, std::memory_order_relaxed);
  last_ns_.store(0, std::memory_order_relaxed);
  on_.store(true, std::memory_order_relaxed);
}

void TraceRecorder::End() {
  const absl::MutexLock lock(&mu_);
  is_under_way_ = false;
  for (TraceSource* const source : sources_) {
    TakeRing(source);
    source->families_.clear();
  }
  lanes_ = nullptr;
  left_ = nullptr;
}

void TraceRecorder::BeginStep(uint64_t step) {
  if (!on()) return;
  step_.store(step, std::memory_order_relaxed);
  has_step_.store(true, std::memory_order_relaxed);
  turns_.fetch_add(1, std::memory_order_relaxed);
  if (first_ns_.load(std::memory_order_relaxed) != 0) return;
  first_ns_.store(TraceNowNs(), std::memory_order_release);
}

void TraceRecorder::EndStep() {
  // A step that was open when the trace was armed is none of its steps.
  if (!on() || first_ns_.load(std::memory_order_relaxed) == 0) return;
  has_step_.store(false, std::memory_order_relaxed);
  turns_.fetch_add(1, std::memory_order_relaxed);
  const uint32_t steps = steps_.load(std::memory_order_relaxed) + 1;
  steps_.store(steps, std::memory_order_release);
  if (steps < steps_max_) return;
  Disarm();
  last_ns_.store(TraceNowNs(), std::memory_order_release);
}

bool TraceRecorder::Take(v1::TraceChunk* chunk) {
  const absl::MutexLock lock(&mu_);
  // Lanes are numbered in the order in which they are added to what is sent.
  chunk->Swap(left_.get());
  left_->Clear();
  bool is_more = false;
  for (TraceSource* const source : sources_) is_more |= Drain(source, chunk);
  if (began_at_ns_ != 0) {
    chunk->set_began_at_ns(began_at_ns_);
    began_at_ns_ = 0;
  }
  return is_more;
}

bool TraceRecorder::Drain(TraceSource* source, v1::TraceChunk* chunk) {
  Span span;
  while (chunk->spans_size() < kChunkSpansMax &&
         source->own_ring_->Pop(&span)) {
    Send(span, source, chunk);
  }
  const uint64_t lost = source->lost_.exchange(0, std::memory_order_relaxed);
  if (first_ns_.load(std::memory_order_acquire) != 0) {
    chunk->set_lost_spans(chunk->lost_spans() + lost);
  }
  return chunk->spans_size() >= kChunkSpansMax;
}

void TraceRecorder::Send(const Span& span, TraceSource* source,
                         v1::TraceChunk* chunk) {
  // Looked at after the span was popped: one of the first step comes after its
  // beginning.
  const int64_t first_ns = first_ns_.load(std::memory_order_acquire);
  const int64_t last_ns = last_ns_.load(std::memory_order_acquire);
  if (first_ns == 0 || span.end_ns < first_ns) return;
  if (last_ns != 0 && span.begin_ns > last_ns) return;
  const int64_t begin_ns = std::max(span.begin_ns, first_ns);
  v1::TraceSpan sent;
  sent.set_name(span.name);
  sent.set_begin_ns(begin_ns - epoch_ns_);
  sent.set_duration_ns(span.end_ns - begin_ns);
  sent.set_step(span.step);
  sent.set_bytes(span.bytes);
  if (!lanes_->Place(FamilyOf(source, span.lane), &sent, chunk)) {
    chunk->set_lost_spans(chunk->lost_spans() + 1);
    return;
  }
  *chunk->add_spans() = std::move(sent);
}

LaneFamily* TraceRecorder::FamilyOf(TraceSource* source, uint32_t lane) {
  if (source->families_.size() <= lane) {
    source->families_.resize(lane + size_t{1}, nullptr);
  }
  LaneFamily*& family = source->families_[lane];
  if (family == nullptr) {
    const LaneName name = source->name_lane_(lane);
    family = lanes_->Find(name.group, name.name);
  }
  return family;
}

}  // namespace optstate::observe
