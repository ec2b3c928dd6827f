#include "server/scheduler/executors/device_load.h"

namespace optstate::scheduler {
namespace {

double PerSecond(uint64_t count, int64_t ns) {
  constexpr double kNsPerSecond = 1e9;
  if (ns <= 0) return 0;
  return static_cast<double>(count) * kNsPerSecond / static_cast<double>(ns);
}

}  // namespace

double DeviceLoad::Work::ElementsPerSecond() const {
  return PerSecond(elements, busy_ns);
}

double DeviceLoad::Work::CopiedBytesPerSecond() const {
  return PerSecond(copied_bytes, busy_ns);
}

void DeviceLoad::Begin(int64_t now_ns) {
  if (under_way_++ == 0) busy_since_ns_ = now_ns;
}

void DeviceLoad::End(int64_t now_ns, uint64_t elements, uint64_t copied_bytes) {
  pass_.elements += elements;
  pass_.copied_bytes += copied_bytes;
  if (--under_way_ == 0) pass_.busy_ns += now_ns - busy_since_ns_;
}

void DeviceLoad::EndPass() {
  if (pass_.elements == 0) return;
  passes_[next_] = pass_;
  next_ = (next_ + 1) % kPasses;
  pass_ = Work();
}

DeviceLoad::Work DeviceLoad::Recent() const {
  Work sum;
  for (const Work& pass : passes_) {
    sum.elements += pass.elements;
    sum.copied_bytes += pass.copied_bytes;
    sum.busy_ns += pass.busy_ns;
  }
  return sum;
}

}  // namespace optstate::scheduler
