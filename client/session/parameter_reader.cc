#include "client/session/parameter_reader.h"

#include <algorithm>

#include "client/views/streaming_copy.h"
#include "proto/types/area_parts.h"
#include "proto/types/dtype.h"

namespace optstate::client {
void ParameterReader::Begin(uint64_t step, const ParameterTargets& targets) {
  step_ = step;
  targets_ = targets;
  has_copied_ = false;
  left_.clear();
  digests_->BeginCopies(step);
  for (size_t i = 0; i < targets.parameters.size(); ++i) {
    const ParameterSpec& spec = layout_->parameters()[targets.parameters[i]];
    if (static_cast<uint64_t>(spec.numel) > kPartElements) {
      AddPieces(i);
    } else {
      AddWhole(i);
    }
  }
}

void ParameterReader::AddPieces(size_t target) {
  const uint32_t p = targets_.parameters[target];
  const auto numel = static_cast<uint64_t>(layout_->parameters()[p].numel);
  for (uint64_t begin = 0; begin < numel;) {
    const uint64_t end = NextCut(*layout_, p, begin);
    left_.push_back({.first_target = target,
                     .end_target = target + 1,
                     .begin = begin,
                     .end = end,
                     .first_run = layout_->run_of(p, begin),
                     .end_run = layout_->run_of(p, end - 1) + 1});
    begin = end;
  }
}

void ParameterReader::AddWhole(size_t target) {
  const uint32_t p = targets_.parameters[target];
  const auto numel = static_cast<uint64_t>(layout_->parameters()[p].numel);
  if (!left_.empty()) {
    Part& last = left_.back();
    const bool follows = last.begin == 0 && last.end_target == target &&
                         target > 0 && targets_.parameters[target - 1] + 1 == p;
    if (follows && last.end + numel <= kPartElements) {
      last.end_target = target + 1;
      last.end += numel;
      last.end_run = layout_->first_run(p + 1);
      return;
    }
  }
  left_.push_back({.first_target = target,
                   .end_target = target + 1,
                   .begin = 0,
                   .end = numel,
                   .first_run = layout_->first_run(p),
                   .end_run = layout_->first_run(p + 1)});
}

bool ParameterReader::CopyReady(const std::atomic<uint64_t>* stamps,
                                const std::byte* area) {
  const auto ready = [&](const Part& part) {
    if (!IsReady(part, stamps)) return false;
    Copy(part, area);
    return true;
  };
  const size_t before = left_.size();
  left_.erase(std::remove_if(left_.begin(), left_.end(), ready), left_.end());
  const bool copied = left_.size() != before;
  if (copied) StreamingFence();
  has_copied_ |= copied;
  return copied;
}

void ParameterReader::CopyRest(const std::byte* area) {
  for (const Part& part : left_) Copy(part, area);
  StreamingFence();
  left_.clear();
}

bool ParameterReader::IsReady(const Part& part,
                              const std::atomic<uint64_t>* stamps) const {
  // The last run is checked first, because it is mostly the last to be stamped.
  for (uint64_t run = part.end_run; run > part.first_run; --run) {
    if (stamps[run - 1].load(std::memory_order_acquire) != step_) return false;
  }
  return true;
}

void ParameterReader::Copy(const Part& part, const std::byte* area) {
  const bool is_piece = part.end_target == part.first_target + 1;
  for (size_t i = part.first_target; i < part.end_target; ++i) {
    const ParameterSpec& spec = layout_->parameters()[targets_.parameters[i]];
    const uint64_t begin = is_piece ? part.begin : 0;
    const uint64_t end =
        is_piece ? part.end : static_cast<uint64_t>(spec.numel);
    if (targets_.destinations[i] == nullptr) {
      if (begin != end) targets_.ready(targets_.parameters[i], begin, end);
      continue;
    }
    if (!digests_->enabled()) {
      CopyElements(i, begin, end, area);
      continue;
    }
    for (uint64_t at = begin; at < end;) {
      const uint64_t next = digests_->BlockEnd(targets_.parameters[i], at);
      CopyElements(i, at, next, area);
      at = next;
    }
  }
}

void ParameterReader::CopyElements(size_t target, uint64_t begin, uint64_t end,
                                   const std::byte* area) {
  const uint32_t p = targets_.parameters[target];
  const uint64_t element_bytes = SizeInBytes(layout_->parameters()[p].dtype);
  const std::byte* const from =
      area + layout_->parameter_offset_bytes(p) + begin * element_bytes;
  StreamingCopy(static_cast<std::byte*>(targets_.destinations[target]) +
                    begin * element_bytes,
                from, (end - begin) * element_bytes,
                layout_->parameter_area_bytes());
  if (digests_->enabled()) digests_->AddBlock(p, begin, from);
}

}  // namespace optstate::client
