#include "client/collective/nodes/job_facts.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/types/accumulation.h"
#include "proto/types/optimizer.h"

namespace optstate::client {

std::string JobFacts(const SessionOptions& options) {
  const LayoutSpec& layout = options.layout;
  std::string facts = absl::StrCat(
      "optimizer ", static_cast<int>(layout.optimizer), "\nstate format ",
      Name(layout.state_format), "\nmaster format ", Name(layout.master_format),
      "\nnumber of parameters ", layout.parameters.size(), "\n");
  for (const ParameterSpec& each : layout.parameters) {
    absl::StrAppend(&facts, "parameter \"", each.name, "\" of shape [",
                    absl::StrJoin(each.shape, " "), "] ", Name(each.dtype),
                    " with gradients ", Name(each.gradient_dtype), " in group ",
                    each.group, "\n");
  }
  for (const GroupSpec& each : layout.groups) {
    absl::StrAppend(&facts, "group with options ", each.options, "\n");
  }
  absl::StrAppend(&facts, "partition ", static_cast<int>(options.partition),
                  "\naccumulate ", options.accumulate ? "yes" : "no", " in ",
                  Name(options.accumulate_dtype), "\n");
  if (!options.loss_scaler.has_value()) {
    return absl::StrCat(facts, "loss scaler none\n");
  }
  const LossScaler& scaler = *options.loss_scaler;
  absl::StrAppendFormat(
      &facts,
      "loss scaler %s %.17g growth_factor %.17g backoff_factor %.17g "
      "growth_interval %d hysteresis %d min_scale %.17g\n",
      scaler.dynamic ? "dynamic" : "static", scaler.init_scale,
      scaler.growth_factor, scaler.backoff_factor, scaler.growth_interval,
      scaler.hysteresis, scaler.min_scale);
  return facts;
}

}  // namespace optstate::client
