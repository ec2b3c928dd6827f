#include "tests/load/cost_sample.h"

#include "absl/strings/str_cat.h"

namespace optstate::load {

std::string CostSample::ToString() const {
  return absl::StrCat("\n    supervisor: ", supervisor.ToString(),
                      "\n    engines:    ", engines.ToString(),
                      "\n    ranks:      ", ranks.ToString());
}

}  // namespace optstate::load
