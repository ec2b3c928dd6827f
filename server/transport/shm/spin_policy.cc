#include "server/transport/shm/spin_policy.h"

#include <sched.h>

#include <algorithm>

namespace optstate::transport {
namespace {

constexpr uint32_t kSpinMicrosecondsMax = 1000;

uint32_t AvailableCores() {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return static_cast<uint32_t>(CPU_COUNT(&cores));
}

}  // namespace

SpinPolicy::SpinPolicy(const v1::EngineSettings& settings)
    : SpinPolicy(settings, AvailableCores()) {}

SpinPolicy::SpinPolicy(const v1::EngineSettings& settings, uint32_t cores)
    : spin_(absl::Microseconds(
          std::min(settings.doorbell_spin_us(), kSpinMicrosecondsMax))),
      workers_(settings.workers()),
      cores_(cores) {}

}  // namespace optstate::transport
