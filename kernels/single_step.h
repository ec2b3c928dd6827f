#ifndef OPTSTATE_KERNELS_SINGLE_STEP_H_
#define OPTSTATE_KERNELS_SINGLE_STEP_H_

#include <elf.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>

#include "gtest/gtest.h"

namespace optstate::kernels {

// A T in memory that a child process shares.
template <typename T>
class SharedMemory {
 public:
  SharedMemory() {
    void* pages = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) std::abort();
    shared_ = new (pages) T;
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { munmap(shared_, sizeof(T)); }

  T* get() const { return shared_; }
  T* operator->() const { return shared_; }

 private:
  T* shared_;
};

// Runs `work` in a child, one instruction at a time (ptrace), and calls `check`
// with the child and the number of instructions after each: shared memory is
// then what a SIGKILL at this point would have left. `work` may not have a loop
// of load-exclusive and store-exclusive (Arm), which never ends when stepped;
// kernels have no atomic operation but stores. Ends when `check` returns false.
// Returns the number of instructions, or -1 when this machine allows no
// tracing, and under sanitizers: their code about each store takes minutes to
// step through (a quarter of an hour was not enough on two cores), is not what
// a kill interrupts, and keeps the kernel's stores as they are. Every other
// test calls the same kernels under sanitizers.
inline int64_t StepChildThrough(
    const std::function<void()>& work,
    const std::function<bool(pid_t, int64_t)>& check) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return -1;
#endif
  enum class Stage { kBefore, kInside, kAfter };
  constexpr int kTraceRefused = 77;
  const SharedMemory<std::atomic<Stage>> stage;
  stage->store(Stage::kBefore);
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(kTraceRefused);
    raise(SIGSTOP);
    stage->store(Stage::kInside);
    work();
    stage->store(Stage::kAfter);
    _exit(0);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) return -1;
  if (WIFEXITED(status)) return -1;
  int64_t instructions = 0;
  bool goes_on = true;
  while (goes_on && stage->load() != Stage::kAfter) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0 ||
        waitpid(child, &status, 0) != child || !WIFSTOPPED(status) ||
        WSTOPSIG(status) != SIGTRAP) {
      ADD_FAILURE() << "the child does not step, status " << status;
      break;
    }
    ++instructions;
    goes_on = check(child, instructions);
    EXPECT_TRUE(goes_on) << "after instruction " << instructions;
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return instructions;
}

// StepChildThrough() for callers that need not look at the child.
inline int64_t StepThrough(const std::function<void()>& work,
                           const std::function<bool(int64_t)>& check) {
  return StepChildThrough(work, [&check](pid_t /*child*/, int64_t instruction) {
    return check(instruction);
  });
}

// Returns where a stopped child will go on; 0 when it cannot be asked.
inline uintptr_t NextInstruction(pid_t child) {
  user_regs_struct registers = {};
  iovec place = {&registers, sizeof(registers)};
  if (ptrace(PTRACE_GETREGSET, child, NT_PRSTATUS, &place) != 0) return 0;
#if defined(__x86_64__)
  return registers.rip;
#else
  return registers.pc;
#endif
}

#define SKIP_IF_UNTRACEABLE(instructions)                         \
  if ((instructions) < 0) {                                       \
    GTEST_SKIP() << "no child can be traced on this machine, or " \
                    "this is a build for a sanitizer";            \
  }

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_SINGLE_STEP_H_
