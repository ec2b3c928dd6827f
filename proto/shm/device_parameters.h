#ifndef OPTSTATE_PROTO_SHM_DEVICE_PARAMETERS_H_
#define OPTSTATE_PROTO_SHM_DEVICE_PARAMETERS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "proto/shm/segment_layout.h"

namespace optstate::shm {

// The table of the parameters that the engine has in memory of devices for
// ranks to copy (v1::DeviceParametersRequest): a sealed segment of the
// engine's, one per job, with a header and an entry for each run of the layout.
// Little endian.
//
// The engine clears an entry's `step` before it changes the run's values, on
// the device or in the parameter area, and sets it when both have the same, but
// before it stamps the run. So a rank may copy a run from the device when, and
// as long as, it may copy it from the parameter area.

inline constexpr uint64_t kDeviceParametersMagic =
    0x3150564454504f53;  // "SOPTDVP1"
inline constexpr uint32_t kDeviceParametersVersion = 1;

struct DeviceParametersHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved0;
  uint64_t segment_bytes;
  uint64_t run_count;
  // Not 0: the engine uses the memory no more, and no entry counts.
  std::atomic<uint64_t> is_over;
  uint8_t reserved[24];
};
static_assert(sizeof(DeviceParametersHeader) == 64);
static_assert(offsetof(DeviceParametersHeader, is_over) == 32);

struct DeviceParameterRun {
  // The device, by its number among the daemon's, in the upper 16 bits, and the
  // offset of the run in its memory, in bytes. Set once, before the first step.
  std::atomic<uint64_t> place;
  // The step whose values the run has there; 0: the device has others.
  std::atomic<uint64_t> step;
};
static_assert(sizeof(DeviceParameterRun) == 16);

inline constexpr int kDeviceParameterOffsetBits = 48;

constexpr uint64_t DeviceParameterPlace(uint64_t device, uint64_t offset) {
  return device << kDeviceParameterOffsetBits | offset;
}
constexpr uint64_t DeviceOfPlace(uint64_t place) {
  return place >> kDeviceParameterOffsetBits;
}
constexpr uint64_t OffsetOfPlace(uint64_t place) {
  return place & ((uint64_t{1} << kDeviceParameterOffsetBits) - 1);
}

// The size in bytes of the table for so many runs.
constexpr uint64_t DeviceParametersBytes(uint64_t run_count) {
  return PageAlign(sizeof(DeviceParametersHeader) +
                   run_count * sizeof(DeviceParameterRun));
}

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_DEVICE_PARAMETERS_H_
