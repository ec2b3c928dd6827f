#include "server/session/steps/micro_steps.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace optstate::session {

void MicroSteps::Reset(const Layout* layout, uint32_t world_size) {
  layout_ = layout;
  const size_t parameters = world_size == 0 ? 0 : layout->parameters().size();
  pushed_.resize(world_size * parameters);
  past_.resize(world_size);
  waiting_.resize(world_size);
  summed_.resize(parameters);
  updated_.resize(parameters);
  whole_.resize(parameters);
  actions_.resize(parameters);
  DropAll();
}

absl::Status MicroSteps::CheckPush(uint32_t rank, uint32_t micro_step,
                                   uint32_t first, uint32_t end) const {
  for (uint32_t p = first; p < end; ++p) {
    const ParameterSpec& spec = layout_->parameters()[p];
    // An empty parameter leaves no trace after a crash, so its push may be
    // repeated at any time.
    if (pushed(rank, p) == micro_step || spec.numel == 0) continue;
    if (micro_step < past_[rank] || micro_step < pushed(rank, p)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter ", p, " \"", spec.name, "\" is pushed at micro-step ",
          micro_step, ", which rank ", rank,
          " has ended already: micro-steps must ascend"));
    }
    if (IsWaiting(rank, p)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter ", p, " \"", spec.name, "\" is pushed at micro-step ",
          micro_step, " before its gradient of micro-step ", pushed(rank, p),
          " is summed: end that micro-step, and wait, before the next"));
    }
  }
  return absl::OkStatus();
}

void MicroSteps::NotePush(uint32_t rank, uint32_t micro_step, uint32_t first,
                          uint32_t end) {
  for (uint32_t p = first; p < end; ++p) {
    if (pushed(rank, p) >= micro_step) continue;
    const bool was_waiting = IsWaiting(rank, p);
    pushed(rank, p) = micro_step;
    if (was_waiting || !IsWaiting(rank, p)) continue;
    ++waiting_[rank];
    ++waiting_count_;
  }
}

bool MicroSteps::NotePast(uint32_t rank, int64_t end) {
  if (end <= past_[rank]) return false;
  past_[rank] = end;
  return true;
}

int64_t MicroSteps::WholeOf(uint32_t parameter) const {
  int64_t lowest = kAll;
  for (uint32_t rank = 0; rank < world_size(); ++rank) {
    if (IsWaiting(rank, parameter)) {
      lowest = std::min(lowest, pushed(rank, parameter));
    }
  }
  if (lowest == kAll) return kNone;
  for (uint32_t rank = 0; rank < world_size(); ++rank) {
    if (pushed(rank, parameter) < lowest && past_[rank] <= lowest) return kNone;
  }
  return lowest;
}

int64_t MicroSteps::TakeWhole(
    uint32_t first, uint32_t end,
    absl::Span<const scheduler::StageAction>* actions) {
  if (waiting_count_ == 0) return kNone;
  int64_t lowest = kAll;
  for (uint32_t p = first; p < end; ++p) {
    whole_[p] = WholeOf(p);
    if (whole_[p] != kNone) lowest = std::min(lowest, whole_[p]);
  }
  if (lowest == kAll) return kNone;
  for (uint32_t p = first; p < end; ++p) {
    const bool take = whole_[p] == lowest;
    actions_[p - first] = take ? scheduler::StageAction::kStage
                               : scheduler::StageAction::kNothing;
    if (take) Sum(p, lowest);
  }
  *actions = absl::MakeConstSpan(actions_).first(end - first);
  return lowest;
}

void MicroSteps::Sum(uint32_t parameter, int64_t micro_step) {
  for (uint32_t rank = 0; rank < world_size(); ++rank) {
    if (!HasPushed(rank, parameter, micro_step)) continue;
    --waiting_[rank];
    --waiting_count_;
  }
  if (summed_[parameter] == kNone) ++summed_count_;
  summed_[parameter] = micro_step;
}

void MicroSteps::NoteSummed(uint32_t parameter, uint32_t micro_step) {
  if (summed_[parameter] == kNone) ++summed_count_;
  summed_[parameter] = micro_step;
  // Every rank with a gradient of this parameter has pushed it.
  for (uint32_t rank = 0; rank < world_size(); ++rank) {
    pushed(rank, parameter) = micro_step;
  }
}

absl::Span<const uint8_t> MicroSteps::SummedParameters() {
  for (size_t p = 0; p < summed_.size(); ++p) {
    updated_[p] = summed_[p] == kNone ? 0 : 1;
  }
  return updated_;
}

void MicroSteps::DropRank(uint32_t rank) {
  std::fill_n(pushed_.begin() + static_cast<int64_t>(rank * summed_.size()),
              summed_.size(), kNone);
  past_[rank] = 0;
  waiting_count_ -= waiting_[rank];
  waiting_[rank] = 0;
}

void MicroSteps::DropAll() {
  std::fill(pushed_.begin(), pushed_.end(), kNone);
  std::fill(past_.begin(), past_.end(), 0);
  std::fill(waiting_.begin(), waiting_.end(), 0);
  std::fill(summed_.begin(), summed_.end(), kNone);
  waiting_count_ = 0;
  summed_count_ = 0;
}

}  // namespace optstate::session
