#ifndef OPTSTATE_PROTO_TYPES_ARRAY_FORMAT_H_
#define OPTSTATE_PROTO_TYPES_ARRAY_FORMAT_H_

#include <cstddef>

#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate {

// Returns the format of state array `array`: the layout's format, except that
// arrays with one number a row or a column are always float32, because they are
// too few for a smaller format to save memory, and each number affects all
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
