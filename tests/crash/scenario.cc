#include "tests/crash/scenario.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace optstate::crash {
namespace {

absl::string_view NameOf(DTypes dtypes) {
  return dtypes == DTypes::kMixed ? "mixed" : Name(static_cast<DType>(dtypes));
}

absl::string_view NameOf(PartitionMode partition) {
  switch (partition) {
    case PartitionMode::kGreedy:
      return "greedy";
    case PartitionMode::kContiguous:
      return "contiguous";
    case PartitionMode::kReplicated:
      return "replicated";
    case PartitionMode::kLocal:
      return "local";
  }
  return "invalid";
}

absl::string_view NameOf(const Accumulation& accumulation) {
  return accumulation.has_value() ? Name(*accumulation) : "none";
}

absl::string_view NameOf(NormType norm_type) {
  switch (norm_type) {
    case NormType::kL1:
      return "1";
    case NormType::kL2:
      return "2";
    case NormType::kInfinity:
      return "infinity";
  }
  return "invalid";
}

absl::string_view NameOf(Scaling scaling) {
  switch (scaling) {
    case Scaling::kRanks:
      return "ranks";
    case Scaling::kStatic:
      return "static";
    case Scaling::kDynamic:
      return "dynamic";
  }
  return "invalid";
}

absl::string_view NameOf(StatePlace place) {
  switch (place) {
    case StatePlace::kMemory:
      return "memory";
    case StatePlace::kMemoryDurable:
      return "memory, durable";
    case StatePlace::kDisk:
      return "disk";
    case StatePlace::kDiskDurable:
      return "disk, durable";
    case StatePlace::kDiskWithParameters:
      return "disk with parameters, durable";
  }
  return "invalid";
}

absl::string_view YesOrNo(bool value) { return value ? "yes" : "no"; }

}  // namespace

std::string Scenario::ToWord() const {
  return absl::StrJoin(
      {seed,
       elements,
       steps,
       uint64_t{world_size},
       static_cast<uint64_t>(optimizer),
       static_cast<uint64_t>(state_format),
       static_cast<uint64_t>(master_format),
       static_cast<uint64_t>(partition),
       accumulation.has_value() ? static_cast<uint64_t>(*accumulation) : 0,
       static_cast<uint64_t>(parameters),
       static_cast<uint64_t>(gradients),
       uint64_t{clip},
       uint64_t{skip},
       uint64_t{missing},
       uint64_t{clip_groups},
       uint64_t{clip_elements},
       static_cast<uint64_t>(norm_type),
       static_cast<uint64_t>(scaling),
       uint64_t{speculative},
       static_cast<uint64_t>(state_place),
       uint64_t{shared}},
      ",");
}

absl::StatusOr<Scenario> Scenario::FromWord(const std::string& word) {
  std::vector<uint64_t> numbers;
  for (const absl::string_view each : absl::StrSplit(word, ',')) {
    uint64_t number = 0;
    if (!absl::SimpleAtoi(each, &number)) {
      return absl::InvalidArgumentError(word);
    }
    numbers.push_back(number);
  }
  if (numbers.size() != 21) return absl::InvalidArgumentError(word);
  Scenario scenario = {.seed = numbers[0],
                       .elements = numbers[1],
                       .steps = numbers[2],
                       .world_size = static_cast<uint32_t>(numbers[3]),
                       .optimizer = static_cast<OptimizerKind>(numbers[4]),
                       .state_format = static_cast<StateFormat>(numbers[5]),
                       .master_format = static_cast<MasterFormat>(numbers[6]),
                       .partition = static_cast<PartitionMode>(numbers[7]),
                       .accumulation = std::nullopt,
                       .parameters = static_cast<DTypes>(numbers[9]),
                       .gradients = static_cast<DTypes>(numbers[10]),
                       .clip = numbers[11] != 0,
                       .skip = numbers[12] != 0,
                       .missing = numbers[13] != 0,
                       .clip_groups = numbers[14] != 0,
                       .clip_elements = numbers[15] != 0,
                       .norm_type = static_cast<NormType>(numbers[16]),
                       .scaling = static_cast<Scaling>(numbers[17]),
                       .speculative = numbers[18] != 0,
                       .state_place = static_cast<StatePlace>(numbers[19]),
                       .shared = numbers[20] != 0};
  if (numbers[8] != 0) {
    scenario.accumulation = static_cast<AccumulateDType>(numbers[8]);
  }
  return scenario;
}

std::vector<std::pair<std::string, std::string>> Scenario::Choices() const {
  const auto text = [](absl::string_view name) { return std::string(name); };
  return {{"optimizer", text(InfoOf(optimizer).name)},
          {"state", text(Name(state_format))},
          {"masters", text(Name(master_format))},
          {"partition", text(NameOf(partition))},
          {"accumulation", text(NameOf(accumulation))},
          {"parameters", text(NameOf(parameters))},
          {"gradients", text(NameOf(gradients))},
          {"ranks", absl::StrCat(world_size)},
          {"clipping", text(YesOrNo(clip))},
          {"of groups", text(YesOrNo(clip_groups))},
          {"of elements", text(YesOrNo(clip_elements))},
          {"norm", text(NameOf(norm_type))},
          {"loss scale", text(NameOf(scaling))},
          {"skipped steps", text(YesOrNo(skip))},
          {"missing gradients", text(YesOrNo(missing))},
          {"speculation", text(YesOrNo(speculative))},
          {"state on", text(NameOf(state_place))},
          {"devices", text(YesOrNo(shared))}};
}

std::string Scenario::Describe() const {
  return absl::StrJoin(Choices(), ", ",
                       [](std::string* out, const auto& choice) {
                         absl::StrAppend(out, choice.first, " ", choice.second);
                       });
}

}  // namespace optstate::crash
