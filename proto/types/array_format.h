#ifndef OPTSTATE_PROTO_TYPES_ARRAY_FORMAT_H_
#define OPTSTATE_PROTO_TYPES_ARRAY_FORMAT_H_

#include <cstddef>

#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate {

// How the elements of state array `array` are kept: in the layout's format, but
// for those with one number a row or a column, which are float32 always: they
// are too few for a smaller format to save memory, and each weighs on all
// elements of its row or column.
inline StateFormat ArrayFormat(const Layout& layout, int array) {
  const auto arrays = layout.optimizer_info().state_arrays;
  const auto index = static_cast<size_t>(array);
  if (index < arrays.size() &&
      (arrays[index].extent == StateExtent::kRows ||
       arrays[index].extent == StateExtent::kColumns)) {
    return StateFormat::kFloat32;
  }
  return layout.state_format();
}

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_ARRAY_FORMAT_H_
