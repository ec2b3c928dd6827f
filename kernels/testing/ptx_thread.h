#ifndef OPTSTATE_KERNELS_TESTING_PTX_THREAD_H_
#define OPTSTATE_KERNELS_TESTING_PTX_THREAD_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/testing/ptx_module.h"

namespace optstate::kernels::testing {

// One thread of a kernel: its registers, of 64 bits each, and where it is. It
// does its part of one block after the other.
class PtxThread {
 public:
  PtxThread(const PtxKernel* kernel, uint32_t thread,
            absl::Span<const uint64_t> arguments, std::byte* shared)
      : kernel_(*kernel),
        thread_(thread),
        arguments_(arguments),
        shared_(shared),
        registers_(kernel->registers) {}

  const absl::Status& failure() const { return failure_; }
  // Returns the barrier at which it waits; null: it does not.
  const PtxInstruction* barrier() const {
    return state_ == State::kAtBarrier ? &kernel_.instructions[next_ - 1]
                                       : nullptr;
  }

  // Goes to the beginning of the kernel, as a thread of this block.
  void Begin(uint32_t block);
  // Goes on to the next barrier, or to the end.
  void Run();

  template <class T>
  T Read(const PtxOperand& operand) const {
    const uint64_t bits = Bits(operand);
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }
  // A signed integer is extended to the register's width.
  template <class T>
  void Write(const PtxOperand& to, T value) {
    uint64_t bits = 0;
    if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
      bits = static_cast<uint64_t>(static_cast<int64_t>(value));
    } else {
      std::memcpy(&bits, &value, sizeof(T));
    }
    registers_[to.index] = bits;
  }

  // Returns where the operand's address leads; null, with a failure, when a
  // device could not follow it.
  void* Global(const PtxOperand& address, size_t bytes) {
    return Follow(Bits(address) + Offset(address), bytes);
  }
  void* Shared(const PtxOperand& address, size_t bytes) {
    const uint64_t offset =
        static_cast<uint32_t>(Bits(address) + Offset(address));
    if (offset + bytes <= kernel_.shared_bytes) {
      return Follow(reinterpret_cast<uint64_t>(shared_ + offset), bytes);
    }
    Fail("an address behind the shared memory");
    return nullptr;
  }
  uint64_t argument(const PtxOperand& parameter) const {
    return arguments_[parameter.bits];
  }

  void WaitAtBarrier() { state_ = State::kAtBarrier; }
  void End() { state_ = State::kEnded; }
  // Ends with an error, which gets the instruction's name.
  void Fail(absl::string_view why) {
    failure_ = absl::InvalidArgumentError(why);
    state_ = State::kEnded;
  }

 private:
  enum class State : uint8_t { kRunning, kAtBarrier, kEnded };

  uint64_t Bits(const PtxOperand& operand) const {
    switch (operand.kind) {
      case PtxOperand::Kind::kRegister:
        return registers_[operand.index];
      case PtxOperand::Kind::kThread:
        return thread_;
      case PtxOperand::Kind::kBlock:
        return block_;
      case PtxOperand::Kind::kImmediate:
        return operand.bits;
    }
    return 0;
  }
  static uint64_t Offset(const PtxOperand& address) {
    return address.kind == PtxOperand::Kind::kRegister ? address.bits : 0;
  }
  void* Follow(uint64_t address, size_t bytes) {
    if (address < 4096 || address % bytes != 0) {
      Fail(absl::StrCat("the address ", absl::Hex(address), " of ", bytes,
                        " bytes is null or not aligned"));
      return nullptr;
    }
    return reinterpret_cast<void*>(address);
  }

  const PtxKernel& kernel_;
  const uint32_t thread_;
  const absl::Span<const uint64_t> arguments_;
  std::byte* const shared_;
  std::vector<uint64_t> registers_;
  uint32_t block_ = 0;
  State state_ = State::kRunning;
  size_t next_ = 0;  // instruction
  uint64_t steps_ = 0;
  absl::Status failure_;
};

}  // namespace optstate::kernels::testing

#endif  // OPTSTATE_KERNELS_TESTING_PTX_THREAD_H_
