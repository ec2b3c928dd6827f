#ifndef OPTSTATE_STORAGE_STATE_SCALES_H_
#define OPTSTATE_STORAGE_STATE_SCALES_H_

#include "proto/types/dtype.h"

namespace optstate::storage {

// Says whether the elements of an array in this format come in blocks of
// kQuantizedBlockElements, each of which has a scale. Scales are an array of
// their own.
constexpr bool HasScales(StateFormat format) {
  switch (format) {
    case StateFormat::kFloat32:
    case StateFormat::kBFloat16:
      return false;
    case StateFormat::kDynamic8:
      return true;
  }
  return false;
}

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_STATE_SCALES_H_
