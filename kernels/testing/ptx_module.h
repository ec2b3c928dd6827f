#ifndef OPTSTATE_KERNELS_TESTING_PTX_MODULE_H_
#define OPTSTATE_KERNELS_TESTING_PTX_MODULE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace optstate::kernels::testing {

struct PtxInstruction;
class PtxThread;

// Does one instruction of one thread.
using PtxHandler = void (*)(const PtxInstruction& instruction,
                            PtxThread* thread);

// Returns the handler of an instruction by its name with all modifiers, such as
// "add.rn.f32"; null: it is none of those that are known. Branches have none.
PtxHandler FindPtxHandler(absl::string_view name);

struct PtxOperand {
  enum class Kind : uint8_t { kRegister, kImmediate, kThread, kBlock };
  Kind kind = Kind::kImmediate;
  uint32_t index = 0;  // of a register
  // The bits of an immediate value or address, or what is added to a register
  // in an address.
  uint64_t bits = 0;
};

struct PtxInstruction {
  std::string text;
  size_t line = 0;               // of the module's text, from 1
  PtxHandler handler = nullptr;  // null: a branch, to `target`
  int guard = -1;                // the predicate's register; -1: none
  bool is_guard_negated = false;
  std::vector<PtxOperand> operands;
  size_t target = 0;
};

// Returns an instruction's line and text, for errors.
std::string NameOf(const PtxInstruction& instruction);

struct PtxKernel {
  std::vector<PtxInstruction> instructions;
  size_t registers = 0;
  size_t parameters = 0;
  size_t shared_bytes = 0;
};

// The kernels in a text that nvcc has written, to be run by the CPU: an address
// is one of this process. It knows the instructions of our kernels and their
// relatives. A block's threads run in turn, each up to its next barrier.
//
// Source: NVIDIA's PTX ISA, version 9.0.
// Threads: thread-safe but for Run().
class PtxModule {
 public:
  // UNIMPLEMENTED: a line has something that is not known; it is in the error.
  static absl::StatusOr<std::unique_ptr<PtxModule>> Parse(
      absl::string_view text);

  // Returns the kernels by mangled name.
  const std::map<std::string, PtxKernel>& kernels() const { return kernels_; }

  // Runs `blocks` blocks of `threads` threads. An argument is the value of a
  // parameter. Errors, with the instruction: INVALID_ARGUMENT, an address that
  // is null or not aligned, which a device would refuse too, a division by
  // zero, or another number of arguments; INTERNAL: threads that do not end, or
  // a barrier that some threads reach and others do not.
  static absl::Status Run(const PtxKernel& kernel, uint32_t blocks,
                          uint32_t threads,
                          absl::Span<const uint64_t> arguments);

 private:
  friend class PtxParser;

  std::map<std::string, PtxKernel> kernels_;
  std::map<std::string, std::vector<uint8_t>> globals_;
};

}  // namespace optstate::kernels::testing

#endif  // OPTSTATE_KERNELS_TESTING_PTX_MODULE_H_
