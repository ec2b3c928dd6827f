#ifndef OPTSTATE_STORAGE_RECORD_VIEW_H_
#define OPTSTATE_STORAGE_RECORD_VIEW_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "proto/types/array_format.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/sub_groups.h"

namespace optstate::storage {

// The arrays that a record may have: masters that are kept beside parameters,
// the optimizer's state arrays, and the scales of their blocks.
inline constexpr int kMasterPart = 0;
inline constexpr int kStatePart0 = 1;
inline constexpr int kScalePart0 = kStatePart0 + kStateArraysMax;
inline constexpr int kRecordPartCount = kScalePart0 + kStateArraysMax;

// Returns bytes [begin, end) of array `part` that hold elements [begin, +numel)
// of the flat space, were the array one piece for the whole job. Scales: those
// of the blocks that the range, which begins with one, touches.
struct PartBytes {
  uint64_t begin = 0;
  uint64_t end = 0;
};
PartBytes PartBytesOf(const Layout& layout, int part, uint64_t flat_begin,
                      uint64_t numel);

// The state of one sub-group, wherever it is: the one place that turns elements
// into bytes.
//
// Elements are named as [begin, +numel) of a parameter and lie within the
// sub-group. Parameters themselves are in the job's parameter area, which
// ranks map and which is in memory always, whatever tier the rest of the record
// is in; or they are a part of the record.
//
// Threads: immutable; different elements may be written by many at once.
// Lifetime: a few addresses, which are valid as long as the pin that gave it.
class RecordView {
 public:
  // The addresses of a record's arrays. Null where the sub-group has none of
  // the kind.
  struct Bases {
    // The addresses of the sub-group's first element.
    std::array<std::byte*, kRecordPartCount> parts = {};
    // The address of the job's parameter area.
    std::byte* parameter_area = nullptr;
    // The address of the record's own parameters; null: they are in the area.
    // A parameter's part begins at its distance from the sub-group's first
    // element times `parameter_pitch_bytes`.
    std::byte* parameters = nullptr;
    uint64_t parameter_pitch_bytes = 0;
  };

  RecordView(const Layout* layout, const SubGroup* sub_group,
             const Bases& bases)
      : layout_(layout), sub_group_(sub_group), bases_(bases) {}

  const Layout& layout() const { return *layout_; }
  const SubGroup& sub_group() const { return *sub_group_; }

  // Returns all that the record has of one array; empty when it has none.
  absl::Span<std::byte> part(int part) const {
    std::byte* const base = BaseOf(part);
    if (base == nullptr) return {};
    const uint64_t elements = sub_group_->elements();
    return {base, PartBytesOf(*layout_, part, 0, elements).end};
  }
  // Returns the elements from `begin` on, of the parameter's dtype.
  std::byte* parameter(uint32_t parameter, uint64_t begin) const {
    const uint64_t bytes = SizeInBytes(layout_->parameters()[parameter].dtype);
    if (bases_.parameters == nullptr) {
      return bases_.parameter_area +
             layout_->parameter_offset_bytes(parameter) + begin * bytes;
    }
    const uint64_t flat = layout_->flat_offset(parameter);
    const uint64_t first = flat > sub_group_->begin ? flat : sub_group_->begin;
    return bases_.parameters +
           (first - sub_group_->begin) * bases_.parameter_pitch_bytes +
           (flat + begin - first) * bytes;
  }
  // Returns the masters, of the master format; the parameter where that is its
  // own master; null where the record has none.
  std::byte* master(uint32_t p, uint64_t begin) const {
    const MasterFormat format = layout_->master_format(p);
    if (format == MasterFormat::kParameter) return parameter(p, begin);
    std::byte* const base = BaseOf(kMasterPart);
    if (base == nullptr) return nullptr;
    return base + Distance(p, begin) * SizeInBytes(format);
  }
  // Returns state array k, in its format; null when the sub-group's group has
  // none.
  std::byte* state(int k, uint32_t parameter, uint64_t begin) const {
    std::byte* const base = BaseOf(kStatePart0 + k);
    if (base == nullptr) return nullptr;
    return base +
           Distance(parameter, begin) * SizeInBytes(ArrayFormat(*layout_, k));
  }
  // Returns the scale of the block that begins at `begin`; null when the array
  // has no scales.
  float* scale(int k, uint32_t parameter, uint64_t begin) const {
    std::byte* const base = BaseOf(kScalePart0 + k);
    if (base == nullptr) return nullptr;
    return reinterpret_cast<float*>(base) +
           Distance(parameter, begin) / kQuantizedBlockElements;
  }
  // Calls visit(bytes) for the bytes that make up the masters of an element
  // range, parameters that are a part of them included.
  template <typename Visitor>
  void ForEachMasterPart(uint32_t p, uint64_t begin, uint64_t numel,
                         const Visitor& visit) const {
    const MasterFormat format = layout_->master_format(p);
    const uint64_t beside = SizeInBytes(format);
    if (beside != 0) visit(absl::MakeSpan(master(p, begin), numel * beside));
    if (format == MasterFormat::kFloat32) return;
    visit(absl::MakeSpan(parameter(p, begin),
                         numel * SizeInBytes(layout_->parameters()[p].dtype)));
  }

  // Calls visit(part, bytes) for the state arrays and scales of an element
  // range that begins with a block.
  template <typename Visitor>
  void ForEachStatePart(uint32_t parameter, uint64_t begin, uint64_t numel,
                        const Visitor& visit) const {
    const uint64_t distance = Distance(parameter, begin);
    for (int part = kStatePart0; part < kRecordPartCount; ++part) {
      std::byte* const base = BaseOf(part);
      if (base == nullptr) continue;
      const PartBytes bytes = PartBytesOf(*layout_, part, distance, numel);
      visit(part, absl::MakeSpan(base + bytes.begin, bytes.end - bytes.begin));
    }
  }

 private:
  std::byte* BaseOf(int part) const {
    return bases_.parts[static_cast<size_t>(part)];
  }
  // Returns the distance from the sub-group's first element.
  uint64_t Distance(uint32_t parameter, uint64_t begin) const {
    return layout_->flat_offset(parameter) + begin - sub_group_->begin;
  }

  const Layout* layout_;
  const SubGroup* sub_group_;
  Bases bases_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_RECORD_VIEW_H_
