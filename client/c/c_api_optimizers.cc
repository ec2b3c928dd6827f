#include "client/c/c_api_optimizers.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/types/optimizer.h"

namespace {

using optstate::OptimizerInfo;

// One row. The table's texts are literals, so they end in a null.
struct Info {
  optstate_optimizer_info info;
  std::vector<optstate_hyperparam_info> hyperparams;
  std::vector<const char*> state_arrays;
  std::vector<uint32_t> state_options;
  std::vector<const char*> options;
};

// Fills `to` in place, because its `info` points to the vectors beside it.
void Fill(const OptimizerInfo& from, Info* to) {
  for (const auto& hyperparam : from.hyperparams) {
    to->hyperparams.push_back({sizeof(optstate_hyperparam_info),
                               hyperparam.name.data(),
                               hyperparam.default_value});
  }
  for (const auto& array : from.state_arrays) {
    to->state_arrays.push_back(array.name.data());
    to->state_options.push_back(array.option);
  }
  for (const auto& option : from.options) to->options.push_back(option.data());
  to->info = {.struct_size = sizeof(optstate_optimizer_info),
              .optimizer = static_cast<int32_t>(from.kind),
              .name = from.name.data(),
              .hyperparams = to->hyperparams.data(),
              .hyperparam_count = to->hyperparams.size(),
              .state_arrays = to->state_arrays.data(),
              .state_options = to->state_options.data(),
              .state_array_count = to->state_arrays.size(),
              .options = to->options.data(),
              .option_count = to->options.size(),
              // C strings: one that is not set has no data.
              .scalar = from.scalar.empty() ? "" : from.scalar.data()};
}

const std::vector<Info>& Infos() {
  static const std::vector<Info>* const infos = [] {
    auto* const made = new std::vector<Info>(optstate::Optimizers().size());
    for (size_t i = 0; i < made->size(); ++i) {
      Fill(optstate::Optimizers()[i], &(*made)[i]);
    }
    return made;
  }();
  return *infos;
}

}  // namespace

namespace optstate::client {

absl::StatusOr<optstate_optimizer_info> OptimizerInfoAt(size_t index) {
  if (index < Infos().size()) return Infos()[index].info;
  return absl::OutOfRangeError(absl::StrCat("optimizer ", index, " of ",
                                            Infos().size(), " that there are"));
}

}  // namespace optstate::client
