#ifndef OPTSTATE_PROTO_SHM_DEVICE_GRADIENTS_H_
#define OPTSTATE_PROTO_SHM_DEVICE_GRADIENTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "proto/shm/segment_layout.h"

namespace optstate::shm {

// The table of the gradients that a rank has in memory of its device besides
// its gradient area (v1::ShareGradientsRequest): a sealed segment of the
// rank's, with a header and an entry for each parameter of the layout. Little
// endian.
//
// The rank clears an entry's `step` before it changes the gradient's bytes
// there, and sets it when they are those of its gradient area, but before it
// pushes the gradient. Both stay until the step's outcome. The area is what
// counts: an engine that finds another step, or other bytes, takes the
// gradient from the area.

inline constexpr uint64_t kDeviceGradientsMagic =
    0x3147564454504f53;  // "SOPTDVG1"
inline constexpr uint32_t kDeviceGradientsVersion = 1;

struct DeviceGradientsHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved0;
  uint64_t segment_bytes;
  uint64_t parameter_count;
  uint8_t reserved[32];
};
static_assert(sizeof(DeviceGradientsHeader) == 64);
static_assert(offsetof(DeviceGradientsHeader, parameter_count) == 24);

struct DeviceGradient {
  // The offset in the memory, in bytes, of the rank's piece of the gradient.
  std::atomic<uint64_t> place;
  // The step whose gradient is there; 0: none.
  std::atomic<uint64_t> step;
};
static_assert(sizeof(DeviceGradient) == 16);

// The size in bytes of the table for so many parameters.
constexpr uint64_t DeviceGradientsBytes(uint64_t parameter_count) {
  return PageAlign(sizeof(DeviceGradientsHeader) +
                   parameter_count * sizeof(DeviceGradient));
}

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_DEVICE_GRADIENTS_H_
