#include "storage/format/step_intent.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/format/checksum.h"

namespace optstate::storage {
namespace {

// Sums the parts' checksums, for Crc32c has no running form.
uint32_t Checksum(const StepIntentHeader& header,
                  absl::Span<const std::byte> rest) {
  const uint32_t parts[2] = {
      Crc32c(&header, offsetof(StepIntentHeader, crc32c)),
      Crc32c(rest.data(), rest.size())};
  return Crc32c(parts, sizeof(parts));
}

// Returns the offset behind the groups, where a uint64_t may lie.
uint64_t UpdatedBytes(uint64_t parameter_count) {
  return (parameter_count + 7) / 8 * 8;
}

}  // namespace

uint64_t StepIntentBytes(uint64_t group_count, uint64_t parameter_count) {
  return sizeof(StepIntentHeader) + group_count * sizeof(StepIntentGroup) +
         UpdatedBytes(parameter_count) + parameter_count * sizeof(uint64_t);
}

void WriteStepIntent(StepIntentHeader header,
                     absl::Span<const StepIntentGroup> groups,
                     absl::Span<const uint8_t> updated,
                     absl::Span<const uint64_t> pushed_by,
                     absl::Span<std::byte> file) {
  header.group_count = static_cast<uint32_t>(groups.size());
  header.parameter_count = static_cast<uint32_t>(updated.size());
  header.has_pushed_by = pushed_by.empty() ? 0 : 1;
  std::byte* to = file.data() + sizeof(header);
  const auto append = [&to](const void* data, size_t bytes) {
    if (bytes > 0) std::memcpy(to, data, bytes);
    to += bytes;
  };
  append(groups.data(), groups.size() * sizeof(StepIntentGroup));
  append(updated.data(), updated.size());
  const uint64_t padding = 0;
  append(&padding, UpdatedBytes(updated.size()) - updated.size());
  append(pushed_by.data(), pushed_by.size() * sizeof(uint64_t));
  const auto end = static_cast<size_t>(to - file.data());
  header.crc32c =
      Checksum(header, file.subspan(sizeof(header), end - sizeof(header)));
  std::memcpy(file.data(), &header, sizeof(header));
}

absl::Status ReadStepIntent(absl::Span<const std::byte> file, uint64_t step,
                            uint64_t group_count, uint64_t parameter_count,
                            StepIntent* intent) {
  const uint64_t bytes = StepIntentBytes(group_count, parameter_count);
  if (file.size() < bytes) {
    return absl::DataLossError(absl::StrCat(
        "step_intent has ", file.size(), " bytes, the layout needs ", bytes));
  }
  StepIntentHeader& header = intent->header;
  std::memcpy(&header, file.data(), sizeof(header));
  if (header.group_count != group_count ||
      header.parameter_count != parameter_count) {
    return absl::DataLossError(
        absl::StrCat("step_intent is of ", header.group_count, " groups and ",
                     header.parameter_count, " parameters, the layout has ",
                     group_count, " and ", parameter_count));
  }
  const uint64_t mask_bytes = parameter_count * sizeof(uint64_t);
  const uint64_t used = bytes - (header.has_pushed_by == 0 ? mask_bytes : 0);
  if (header.crc32c !=
      Checksum(header, file.subspan(sizeof(header), used - sizeof(header)))) {
    return absl::DataLossError("step_intent: the checksum is wrong");
  }
  if (header.record.committed_step != step) {
    return absl::DataLossError(
        absl::StrCat("step_intent is of step ", header.record.committed_step,
                     ", step ", step, " is in progress"));
  }
  const std::byte* groups = file.data() + sizeof(header);
  intent->groups = {reinterpret_cast<const StepIntentGroup*>(groups),
                    group_count};
  intent->updated = {reinterpret_cast<const uint8_t*>(
                         groups + group_count * sizeof(StepIntentGroup)),
                     parameter_count};
  intent->pushed_by = {};
  if (header.has_pushed_by != 0) {
    intent->pushed_by = {
        reinterpret_cast<const uint64_t*>(file.data() + bytes - mask_bytes),
        parameter_count};
  }
  return absl::OkStatus();
}

}  // namespace optstate::storage
