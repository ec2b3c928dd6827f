#ifndef OPTSTATE_STORAGE_ACCELERATOR_EMULATED_FAULTS_H_
#define OPTSTATE_STORAGE_ACCELERATOR_EMULATED_FAULTS_H_

#include <atomic>
#include <cstdint>

namespace optstate::accelerator {

// Faults that a test injects into an emulated device. Thread-safe.
class EmulatedFaults {
 public:
  // Lets the launch behind the next `launches` fail with UNAVAILABLE; the
  // device goes on.
  void FailLaunchAfter(int64_t launches) { launches_ = launches; }
  // Lets the export behind the next `exports` be refused, as by a driver that
  // shares no memory.
  void RefuseExportAfter(int64_t exports) { exports_ = exports; }
  // Lets the device be lost behind the next `commands` of its streams.
  void LoseAfter(int64_t commands) { commands_ = commands; }

  // The device asks before each launch, export and command.
  bool FailsLaunch() { return IsNow(&launches_); }
  bool RefusesExport() { return IsNow(&exports_); }
  bool LosesDevice() { return IsNow(&commands_); }

 private:
  static constexpr int64_t kNever = -1;

  // Counts down to 0, where it is now, and further: no more than once.
  static bool IsNow(std::atomic<int64_t>* left) {
    int64_t now = left->load();
    while (now != kNever && !left->compare_exchange_weak(now, now - 1)) {
    }
    return now == 0;
  }

  std::atomic<int64_t> launches_{kNever};
  std::atomic<int64_t> exports_{kNever};
  std::atomic<int64_t> commands_{kNever};
};

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_EMULATED_FAULTS_H_
