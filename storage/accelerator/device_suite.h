#ifndef OPTSTATE_STORAGE_ACCELERATOR_DEVICE_SUITE_H_
#define OPTSTATE_STORAGE_ACCELERATOR_DEVICE_SUITE_H_

#include <cstddef>
#include <memory>
#include <ostream>
#include <random>
#include <string>

#include "gtest/gtest.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/accelerator/host_buffer.h"

namespace optstate::accelerator {

struct DeviceRuntimeParam {
  std::string name;
  std::unique_ptr<DeviceRuntime> (*make)();
};
inline void PrintTo(const DeviceRuntimeParam& param, std::ostream* out) {
  *out << param.name;
}

// The guarantees of a runtime and its devices. A binary that links the suite
// instantiates it. Skips, with the reason, where the runtime has no device.
class DeviceSuite : public testing::TestWithParam<DeviceRuntimeParam> {
 protected:
  DeviceSuite();
  void SetUp() override;

  std::unique_ptr<DeviceStream> MakeStream();
  std::unique_ptr<DeviceEvent> MakeEvent();
  // Allocates memory that lives as long as the test.
  DeviceAddress Allocate(size_t bytes);

  std::unique_ptr<DeviceRuntime> runtime_;
  std::unique_ptr<Device> device_;
  std::mt19937 random_;
};

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_DEVICE_SUITE_H_
