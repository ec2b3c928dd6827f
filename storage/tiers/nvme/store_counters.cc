#include "storage/tiers/nvme/store_counters.h"

#include <pthread.h>
#include <time.h>

namespace optstate::nvme {
namespace {

uint64_t NanosOf(clockid_t clock) {
  timespec now = {};
  if (::clock_gettime(clock, &now) != 0) return 0;
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

StoreCounters::CallerTimer::CallerTimer(StoreCounters* counters)
    : counters_(*counters), begin_ns_(NanosOf(CLOCK_THREAD_CPUTIME_ID)) {}

StoreCounters::CallerTimer::~CallerTimer() {
  counters_.callers_cpu_ns_ += NanosOf(CLOCK_THREAD_CPUTIME_ID) - begin_ns_;
}

StoreCounters::StoreCounters() : opened_ns_(NanosOf(CLOCK_MONOTONIC)) {}

void StoreCounters::OnPass() {
  ++counters_.passes;
  const storage::PassCounters all = Totals();
  counters_.last_pass = {
      .bytes_read = all.bytes_read - before_pass_.bytes_read,
      .bytes_written = all.bytes_written - before_pass_.bytes_written,
      .cpu_ns = all.cpu_ns - before_pass_.cpu_ns,
      .elapsed_ns = all.elapsed_ns - before_pass_.elapsed_ns,
      .waited_ns = all.waited_ns - before_pass_.waited_ns};
  before_pass_ = all;
}

void StoreCounters::BeginWait() {
  if (waiting_++ == 0) waiting_since_ns_ = NanosOf(CLOCK_MONOTONIC);
}

void StoreCounters::EndWait() {
  if (--waiting_ == 0) {
    waited_ns_ += NanosOf(CLOCK_MONOTONIC) - waiting_since_ns_;
  }
}

uint64_t StoreCounters::waited_ns() const {
  if (waiting_ == 0) return waited_ns_;
  return waited_ns_ + NanosOf(CLOCK_MONOTONIC) - waiting_since_ns_;
}

void StoreCounters::SetIoThread() {
  clockid_t clock;
  if (::pthread_getcpuclockid(::pthread_self(), &clock) == 0) io_clock_ = clock;
}

void StoreCounters::EndIoThread() {
  if (io_clock_.has_value()) ended_cpu_ns_ += NanosOf(*io_clock_);
  io_clock_.reset();
}

storage::PassCounters StoreCounters::Totals() const {
  storage::PassCounters totals;
  totals.bytes_read = counters_.bytes_read;
  totals.bytes_written = counters_.bytes_written;
  totals.cpu_ns = callers_cpu_ns_ + ended_cpu_ns_;
  if (io_clock_.has_value()) totals.cpu_ns += NanosOf(*io_clock_);
  // The part is taken before the whole, so that it is no more than that.
  totals.waited_ns = waited_ns();
  totals.elapsed_ns = NanosOf(CLOCK_MONOTONIC) - opened_ns_;
  return totals;
}

storage::SwapCounters StoreCounters::all() const {
  storage::SwapCounters counters = counters_;
  counters.cpu_ns = Totals().cpu_ns;
  return counters;
}

}  // namespace optstate::nvme
