#include "server/session/transfer/damaged_records.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/status_macros.h"
#include "server/session/transfer/element_access.h"

namespace optstate::session {
namespace {

// Elements of a record, over all its arrays.
struct Coverage {
  uint64_t elements = 0;
  uint64_t loaded = 0;

  bool is_whole() const { return loaded == elements; }
};

// Returns whether a parameter's masters are in its records: not those that are
// the parameter itself, which ranks map.
bool HasMasters(const storage::StateStore& store, uint32_t parameter) {
  return store.parameter_area().empty() ||
         store.layout().master_format(parameter) != MasterFormat::kParameter;
}

uint64_t ElementsOf(const storage::StateStore& store, const SubGroup& range) {
  const Layout& layout = store.layout();
  uint64_t elements = 0;
  for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
    const ParameterSpec& spec = layout.parameters()[p];
    const uint64_t flat = layout.flat_offset(p);
    const auto add = [&](uint64_t numel) {
      const uint64_t begin = std::max(flat, range.begin);
      const uint64_t end = std::min(flat + numel, range.end);
      if (begin < end) elements += end - begin;
    };
    if (HasMasters(store, p)) add(static_cast<uint64_t>(spec.numel));
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!layout.has_state_array(k, range.group)) continue;
      add(StateElements(layout.optimizer_info(), k, spec.shape));
    }
  }
  return elements;
}

// Returns the coverage of all records, by sub-group. Entries of a log do not
// overlap.
std::vector<Coverage> CoverageOf(
    const storage::StateStore& store,
    absl::Span<const storage::LoadLogRecord> load) {
  const SubGroupTable& sub_groups = store.sub_groups();
  std::vector<Coverage> coverage(sub_groups.size());
  for (size_t i = 0; i < sub_groups.size(); ++i) {
    coverage[i].elements = ElementsOf(store, sub_groups[i]);
  }
  for (const auto& [entry, payload] : load) {
    const auto array = static_cast<v1::StateArray>(entry.array);
    if (ElementAccess::IsPerParameter(array) ||
        (array == v1::STATE_ARRAY_MASTER &&
         !HasMasters(store, entry.parameter))) {
      continue;
    }
    const uint64_t flat = store.layout().flat_offset(entry.parameter);
    const uint64_t end = entry.begin + entry.numel;
    for (uint64_t begin = entry.begin; begin < end;) {
      const size_t i = sub_groups.IndexOf(entry.parameter, begin);
      const uint64_t part_end = std::min(end, sub_groups[i].end - flat);
      coverage[i].loaded += part_end - begin;
      begin = part_end;
    }
  }
  return coverage;
}

absl::Status CheckWhole(const Coverage& coverage, const SubGroup& range,
                        const Layout& layout) {
  if (coverage.is_whole()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "the record of parameters \"",
      layout.parameters()[range.first_parameter].name, "\" to \"",
      layout.parameters()[range.end_parameter - 1].name,
      "\" is damaged, and the load has ", coverage.loaded, " of its ",
      coverage.elements,
      " elements: masters and all state arrays of all these parameters are "
      "needed to replace it"));
}

}  // namespace

absl::Status CheckReplaced(const std::set<size_t>& damaged,
                           const storage::StateStore& store,
                           absl::Span<const storage::LoadLogRecord> load) {
  if (damaged.empty()) return absl::OkStatus();
  const std::vector<Coverage> coverage = CoverageOf(store, load);
  for (const size_t i : damaged) {
    OPTSTATE_RETURN_IF_ERROR(
        CheckWhole(coverage[i], store.sub_groups()[i], store.layout()));
  }
  return absl::OkStatus();
}

absl::Status LeftOutOfDamaged(const absl::Status& damage) {
  return absl::AbortedError(absl::StrCat(
      "a record was found damaged when a part of this load had been compared "
      "with it and left out as equal. The job is as it was before: load "
      "again, which replaces the record. The damage: ",
      damage.message()));
}

absl::Status CheckLeftOut(const std::set<size_t>& left_out,
                          storage::StateStore* store,
                          absl::Span<const storage::LoadLogRecord> load) {
  if (left_out.empty()) return absl::OkStatus();
  const std::vector<Coverage> coverage = CoverageOf(*store, load);
  for (const size_t i : left_out) {
    if (coverage[i].loaded == 0) continue;
    const absl::Status readable =
        store->PinSubGroup(i, storage::StateStore::Access::kRead).status();
    if (absl::IsDataLoss(readable)) return LeftOutOfDamaged(readable);
    OPTSTATE_RETURN_IF_ERROR(readable);
  }
  return absl::OkStatus();
}

absl::Status ReplaceDamaged(storage::StateStore* store,
                            absl::Span<const storage::LoadLogRecord> load,
                            std::set<size_t>* replaced) {
  const std::vector<Coverage> coverage = CoverageOf(*store, load);
  for (size_t i = 0; i < coverage.size(); ++i) {
    if (coverage[i].loaded == 0) continue;
    absl::Status readable =
        store->PinSubGroup(i, storage::StateStore::Access::kRead).status();
    if (readable.ok()) continue;
    if (!absl::IsDataLoss(readable)) return readable;
    OPTSTATE_RETURN_IF_ERROR(
        CheckWhole(coverage[i], store->sub_groups()[i], store->layout()));
    OPTSTATE_RETURN_IF_ERROR(
        store->PinSubGroup(i, storage::StateStore::Access::kOverwrite)
            .status());
    replaced->insert(i);
  }
  return absl::OkStatus();
}

}  // namespace optstate::session
