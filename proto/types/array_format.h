#ifndef OPTSTATE_PROTO_TYPES_ARRAY_FORMAT_H_
#define OPTSTATE_PROTO_TYPES_ARRAY_FORMAT_H_

#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate {

// How the elements of state array `array` are kept: in the layout's format, but
// for Adafactor's row_var and col_var, which are float32 always: one number a
// row or a column is too few for a smaller format to save memory, and each
// weighs on all elements of its row or column.
inline StateFormat ArrayFormat(const Layout& layout, int array) {
  const bool is_of_rows_or_columns =
      layout.optimizer() == OptimizerKind::kAdafactor && array < 2;
  return is_of_rows_or_columns ? StateFormat::kFloat32 : layout.state_format();
}

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_ARRAY_FORMAT_H_
