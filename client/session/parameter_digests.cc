#include "client/session/parameter_digests.h"

#include <algorithm>

#include "client/session/content_digest.h"
#include "proto/types/area_parts.h"
#include "proto/types/dtype.h"

namespace optstate::client {
namespace {

// The block size: a first-level cache holds two blocks.
constexpr uint64_t kBlockElements = kTileElements;
static_assert(kPartElements % kBlockElements == 0);

// ChangeDetection::kSample checks one line of each page of this size.
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kLineBytes = 64;
constexpr uint64_t kLinesPerPage = kPageBytes / kLineBytes;

// Digests one line of each page. The line advances through the page with the
// steps, so that all ranks check the same line, and a lasting change is found
// in the end.
uint64_t SampleDigest(absl::Span<const std::byte> data, uint64_t seed,
                      uint64_t step) {
  if (data.size() <= kPageBytes) return ContentDigest(data, seed);
  uint64_t digest = seed;
  for (uint64_t at = step % kLinesPerPage * kLineBytes; at < data.size();
       at += kPageBytes) {
    digest = ContentDigest(data.subspan(at, kLineBytes), digest);
  }
  return digest;
}

}  // namespace

ParameterDigests::ParameterDigests(const Layout* layout,
                                   ChangeDetection detection)
    : layout_(layout), detection_(detection) {
  if (enabled()) entries_.resize(layout->parameters().size());
}

uint64_t ParameterDigests::BlockEnd(uint32_t parameter, uint64_t begin) const {
  const ParameterSpec& spec = layout_->parameters()[parameter];
  // The offset counts from the group's beginning, as for parts.
  const uint64_t offset =
      layout_->flat_offset(parameter) - layout_->group_begin(spec.group);
  const uint64_t end =
      ((offset + begin) / kBlockElements + 1) * kBlockElements - offset;
  return std::min(end, static_cast<uint64_t>(spec.numel));
}

void ParameterDigests::AddBlock(uint32_t parameter, uint64_t begin,
                                const std::byte* data) {
  const uint64_t elements = BlockEnd(parameter, begin) - begin;
  const uint64_t bytes =
      elements * SizeInBytes(layout_->parameters()[parameter].dtype);
  Entry& entry = entries_[parameter];
  if (entry.copies != copies_) entry = {.copies = copies_, .step = step_};
  entry.sum += BlockDigest(absl::MakeConstSpan(data, bytes), begin, step_);
  entry.elements += elements;
}

void ParameterDigests::AddWhole(uint32_t parameter, const std::byte* data) {
  const ParameterSpec& spec = layout_->parameters()[parameter];
  const uint64_t element_bytes = SizeInBytes(spec.dtype);
  for (uint64_t begin = 0; begin < static_cast<uint64_t>(spec.numel);
       begin = BlockEnd(parameter, begin)) {
    AddBlock(parameter, begin, data + begin * element_bytes);
  }
}

bool ParameterDigests::Differs(uint32_t parameter,
                               const std::byte* data) const {
  const ParameterSpec& spec = layout_->parameters()[parameter];
  const auto numel = static_cast<uint64_t>(spec.numel);
  const Entry& entry = entries_[parameter];
  if (entry.elements != numel) return false;
  const uint64_t element_bytes = SizeInBytes(spec.dtype);
  uint64_t sum = 0;
  for (uint64_t begin = 0; begin < numel;) {
    const uint64_t end = BlockEnd(parameter, begin);
    const auto block = absl::MakeConstSpan(data + begin * element_bytes,
                                           (end - begin) * element_bytes);
    sum += BlockDigest(block, begin, entry.step);
    begin = end;
  }
  return sum != entry.sum;
}

uint64_t ParameterDigests::BlockDigest(absl::Span<const std::byte> block,
                                       uint64_t begin, uint64_t step) const {
  return detection_ == ChangeDetection::kSample
             ? SampleDigest(block, begin, step)
             : ContentDigest(block, begin);
}

}  // namespace optstate::client
