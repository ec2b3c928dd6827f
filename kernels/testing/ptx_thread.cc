#include "kernels/testing/ptx_thread.h"

namespace optstate::kernels::testing {
namespace {

// More than any of our kernels takes for a tile, or for a small parameter.
constexpr uint64_t kStepsMax = 10'000'000;

}  // namespace

void PtxThread::Begin(uint32_t block) {
  block_ = block;
  state_ = State::kRunning;
  next_ = 0;
  steps_ = 0;
  failure_ = absl::OkStatus();
}

void PtxThread::Run() {
  state_ = State::kRunning;
  while (state_ == State::kRunning) {
    if (next_ == kernel_.instructions.size()) return End();
    const PtxInstruction& instruction = kernel_.instructions[next_++];
    if (++steps_ > kStepsMax) {
      failure_ = absl::InternalError("the thread does not end");
      return End();
    }
    if (instruction.guard >= 0) {
      const auto guard = static_cast<size_t>(instruction.guard);
      if ((registers_[guard] != 0) == instruction.is_guard_negated) continue;
    }
    if (instruction.handler == nullptr) {
      next_ = instruction.target;
      continue;
    }
    instruction.handler(instruction, this);
    if (!failure_.ok()) {
      failure_ = absl::Status(failure_.code(),
                              absl::StrCat(NameOf(instruction), " (thread ",
                                           thread_, "): ", failure_.message()));
    }
  }
}

}  // namespace optstate::kernels::testing
