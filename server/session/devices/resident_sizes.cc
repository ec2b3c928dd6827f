#include "server/session/devices/resident_sizes.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/runs.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "server/scheduler/executors/kept_parameters.h"
#include "server/scheduler/executors/resident_batch.h"
#include "server/scheduler/executors/resident_records.h"
#include "server/scheduler/executors/shared_parameters.h"
#include "server/scheduler/executors/whole_batch.h"
#include "server/scheduler/executors/whole_parameter.h"
#include "server/scheduler/gradient_log.h"
#include "server/session/durability/job_storage.h"

namespace optstate::session {
namespace {

using scheduler::GradientLog;

// The bytes of a parameter's records, of their parameters on a device for
// ranks, and of a log that has them all.
struct Needs {
  uint64_t record_bytes = 0;
  uint64_t parameter_bytes = 0;
  GradientLog::Room log;
};

// With sums of micro-steps an update has one gradient, whose dtype is theirs.
GradientLog::Content LogContentOf(const JobDescription& description) {
  const bool sums_ranks = description.partition == PartitionMode::kReplicated &&
                          description.world_size > 1 && !description.accumulate;
  return sums_ranks ? GradientLog::Content::kSum
                    : GradientLog::Content::kGradient;
}

// Returns the dtype of what the log has.
DType LogDTypeOf(const JobDescription& description,
                 const ParameterSpec& parameter) {
  return LogContentOf(description) == GradientLog::Content::kSum ||
                 description.accumulation() == AccumulateDType::kFloat32
             ? DType::kFloat32
             : parameter.gradient_dtype;
}

uint64_t AlignedForLog(uint64_t bytes) {
  constexpr uint64_t kAlign = GradientLog::kAlignBytes;
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

// Returns the needs of each parameter whose records can stay.
std::vector<Needs> NeedsOf(const JobDescription& description) {
  const Layout& layout = description.layout;
  // Only which arrays a record has counts, not where they are.
  kernels::UpdateKernelKey key;
  key.state = layout.state_format();
  kernels::TileView view;
  static std::byte somewhere;
  std::vector<Needs> all;
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const MasterFormat master = layout.master_format(p);
    const ParameterSpec& parameter = layout.parameters()[p];
    key.parameter = parameter.dtype;
    key.master = master;
    for (int k = 0; k < kStateArraysMax; ++k) {
      view.state[k] =
          layout.has_state_array(k, parameter.group) ? &somewhere : nullptr;
    }
    const uint64_t gradient_bytes =
        SizeInBytes(LogDTypeOf(description, parameter));
    Needs needs;
    ForEachRun(layout, p, 0, static_cast<uint64_t>(parameter.numel),
               [&](uint64_t /*run*/, uint64_t /*begin*/, uint64_t numel) {
                 view.numel = numel;
                 needs.record_bytes +=
                     scheduler::ResidentRecords::RecordBytes(key, view);
                 needs.parameter_bytes += scheduler::SharedParameters::Aligned(
                     numel * SizeInBytes(parameter.dtype));
                 ++needs.log.tiles;
                 needs.log.step_bytes +=
                     GradientLog::EntryBytes(numel * gradient_bytes);
                 if (master == MasterFormat::kFloat32) return;
                 needs.log.parameter_bytes +=
                     AlignedForLog(numel * SizeInBytes(parameter.dtype));
               });
    if (needs.log.tiles > 0) all.push_back(needs);
  }
  return all;
}

Needs SumOf(const std::vector<Needs>& all) {
  Needs sum;
  for (const Needs& needs : all) {
    sum.record_bytes += needs.record_bytes;
    sum.parameter_bytes += needs.parameter_bytes;
    sum.log.tiles += needs.log.tiles;
    sum.log.step_bytes += needs.log.step_bytes;
    sum.log.parameter_bytes += needs.log.parameter_bytes;
  }
  return sum;
}

// Returns this part of `bytes`, and room for the tiles at its border.
uint64_t PartOf(uint64_t bytes, double part) {
  constexpr uint64_t kBorderBytes = 4 * kTileElements * 4 * sizeof(float);
  const double exact = static_cast<double>(bytes) * part;
  return std::min(bytes,
                  static_cast<uint64_t>(std::ceil(exact)) + kBorderBytes);
}

// Returns the most that records of so many bytes can need of something,
// whatever parameters they are of, and room for the tiles at the border.
template <typename BytesOf>
uint64_t MostWithin(uint64_t record_bytes, std::vector<Needs> all,
                    const BytesOf& bytes_of) {
  const auto of_each = [&](const Needs& needs) {
    return static_cast<double>(bytes_of(needs)) /
           static_cast<double>(needs.record_bytes);
  };
  std::sort(all.begin(), all.end(), [&](const Needs& a, const Needs& b) {
    return of_each(a) > of_each(b);
  });
  double most = 0;
  uint64_t total = 0;
  for (const Needs& needs : all) {
    const uint64_t taken = std::min(record_bytes, needs.record_bytes);
    most += of_each(needs) * static_cast<double>(taken);
    record_bytes -= taken;
    total += bytes_of(needs);
  }
  return PartOf(total, total == 0 ? 0 : most / static_cast<double>(total));
}

// Returns the sizes for an optimizer that needs whole parameters, of which
// devices keep copies.
ResidentSizes SizesOfWhole(const Layout& layout, uint64_t budget, double part) {
  using scheduler::KeptParameters;
  using scheduler::WholeBatch;
  ResidentSizes sizes;
  sizes.batch_host_bytes =
      scheduler::DeviceUpdateExecutor::BatchBytesFor(layout);
  uint64_t total = 0;  // of all parameters
  uint64_t fitting = 0;
  uint64_t largest = 0;
  for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
    const scheduler::WholeParameter facts =
        scheduler::WholeParameterOf(layout, p);
    if (layout.parameters()[p].numel == 0) continue;
    const uint64_t bytes = KeptParameters::BytesOf(facts);
    total += bytes;
    if (WholeBatch::BytesOf(layout.optimizer(), facts) >
        sizes.batch_host_bytes) {
      continue;
    }
    fitting += bytes;
    largest = std::max(largest, bytes);
  }
  // The CPU has those that are too large for a batch, as a part of its share. A
  // parameter at the border has room.
  const double exact = static_cast<double>(total) * part;
  sizes.device_bytes = std::min(
      budget,
      std::min(fitting, static_cast<uint64_t>(std::ceil(exact)) + largest));
  return sizes.device_bytes == 0 ? ResidentSizes() : sizes;
}

}  // namespace

ResidentSizes ResidentSizesOf(const JobDescription& description,
                              size_t devices) {
  const uint64_t budget = DeviceBudgetOf(description.storage);
  const double fraction = 1 - OffloadFractionOf(description.storage);
  if (budget == 0 || fraction == 0 || devices == 0 || description.speculative) {
    return {};
  }
  if (!description.layout.optimizer_info().is_separable) {
    return SizesOfWhole(description.layout, budget,
                        fraction / static_cast<double>(devices));
  }
  const std::vector<Needs> all = NeedsOf(description);
  const Needs sum = SumOf(all);
  if (sum.log.tiles == 0) return {};
  ResidentSizes sizes;
  sizes.device_bytes = std::min(
      budget,
      PartOf(sum.record_bytes, fraction / static_cast<double>(devices)));
  // Which records stay is known in the first step.
  const uint64_t stays = sizes.device_bytes * devices;
  sizes.log = {
      sum.log.tiles,
      MostWithin(stays, all, [](const Needs& of) { return of.log.step_bytes; }),
      MostWithin(stays, all,
                 [](const Needs& of) { return of.log.parameter_bytes; })};
  sizes.log_content = LogContentOf(description);
  sizes.parameter_bytes =
      MostWithin(sizes.device_bytes, all,
                 [](const Needs& of) { return of.parameter_bytes; });
  // A parameter has at most twice the bytes of its gradient.
  sizes.batch_bytes = std::min(scheduler::DeviceUpdateExecutor::kResidentBytes,
                               2 * sizes.log.step_bytes);
  sizes.batch_host_bytes =
      scheduler::ResidentBatch::HostBytes(sizes.batch_bytes);
  return sizes;
}

uint64_t GradientLogBytes(const JobDescription& description, size_t devices) {
  const ResidentSizes sizes = ResidentSizesOf(description, devices);
  if (sizes.log.tiles == 0) return 0;
  return GradientLog::BytesNeeded(sizes.log);
}

absl::Status CheckResidents(const JobDescription& description) {
  if (DeviceBudgetOf(description.storage) == 0) return absl::OkStatus();
  if (description.speculative) {
    return absl::FailedPreconditionError(
        "device_budget and speculative: what a step overwrites on a device "
        "cannot be rolled back; leave one of them out");
  }
  return absl::OkStatus();
}

}  // namespace optstate::session
