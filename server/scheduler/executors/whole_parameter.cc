#include "server/scheduler/executors/whole_parameter.h"

#include "proto/types/array_format.h"
#include "proto/types/dtype.h"

namespace optstate::scheduler {

WholeParameter WholeParameterOf(const Layout& layout, uint32_t parameter) {
  const ParameterSpec& spec = layout.parameters()[parameter];
  WholeParameter facts;
  facts.shape = spec.shape;
  for (int k = 0; k < kStateArraysMax; ++k) {
    if (!layout.has_state_array(k, spec.group)) continue;
    facts.state_elements[k] =
        StateElements(layout.optimizer_info(), k, spec.shape);
    facts.keeps_floats[k] = ArrayFormat(layout, k) == StateFormat::kFloat32;
  }
  return facts;
}

}  // namespace optstate::scheduler
