#include "kernels/master_format.h"

#include <cstdint>
#include <cstring>

#include "kernels/cast.h"
#include "kernels/split_master.h"

namespace optstate::kernels {
namespace {

// Calls memcpy, whose pointers may be null when there is nothing to copy.
void Copy(void* to, const void* from, size_t numel) {
  if (numel > 0) std::memcpy(to, from, numel * sizeof(float));
}

}  // namespace

void MasterToFloat(MasterFormat format, const void* parameter,
                   const void* master, float* out, size_t numel) {
  switch (format) {
    case MasterFormat::kFloat32:
      return Copy(out, master, numel);
    case MasterFormat::kParameter:
      return Copy(out, parameter, numel);
    case MasterFormat::kSplit:
      for (size_t i = 0; i < numel; ++i) {
        out[i] = JoinMaster(static_cast<const uint16_t*>(parameter)[i],
                            static_cast<const uint16_t*>(master)[i]);
      }
      return;
  }
}

void MasterFromFloat(MasterFormat format, DType dtype, const float* in,
                     void* parameter, void* master, size_t numel) {
  switch (format) {
    case MasterFormat::kFloat32:
      Copy(master, in, numel);
      return CastFromFloat(dtype, in, parameter, numel);
    case MasterFormat::kParameter:
      return Copy(parameter, in, numel);
    case MasterFormat::kSplit:
      return SplitMaster(in, static_cast<uint16_t*>(parameter),
                         static_cast<uint16_t*>(master), numel);
  }
}

}  // namespace optstate::kernels
