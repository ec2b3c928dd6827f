#include "server/session/testing/held_read.h"

#include <sys/types.h>

#include <cstddef>
#include <utility>

static std::atomic<const std::function<void()>*> on_read = nullptr;

ssize_t RealRead(int fd, void* to, size_t bytes, off_t at) asm("__real_pread");
ssize_t WrappedRead(int fd, void* to, size_t bytes,
                    off_t at) asm("__wrap_pread");
ssize_t WrappedRead(int fd, void* to, size_t bytes, off_t at) {
  const std::function<void()>* hook = on_read;
  if (hook != nullptr) (*hook)();
  return RealRead(fd, to, bytes, at);
}

namespace optstate::session {

ReadHook::ReadHook(std::function<void()> hook) : hook_(std::move(hook)) {
  on_read = &hook_;
}

ReadHook::~ReadHook() { on_read = nullptr; }

}  // namespace optstate::session
