#ifndef OPTSTATE_KERNELS_CPU_GUARDED_INPUT_H_
#define OPTSTATE_KERNELS_CPU_GUARDED_INPUT_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>

namespace optstate::kernels {

// Bytes right before a page that may not be touched: an access is a crash. For
// tests that a function reads nothing behind its arrays. Move-only.
class GuardedInput {
 public:
  explicit GuardedInput(size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t whole = (bytes + page - 1) / page * page;
    mapped_bytes_ = whole + page;
    void* const pages = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) std::abort();
    pages_ = static_cast<uint8_t*>(pages);
    if (mprotect(pages_ + whole, page, PROT_NONE) != 0) std::abort();
    data_ = pages_ + whole - bytes;
  }
  GuardedInput(GuardedInput&& other) noexcept
      : pages_(std::exchange(other.pages_, nullptr)),
        mapped_bytes_(other.mapped_bytes_),
        data_(other.data_) {}
  GuardedInput& operator=(GuardedInput&&) = delete;
  ~GuardedInput() {
    if (pages_ != nullptr) munmap(pages_, mapped_bytes_);
  }

  uint8_t* data() const { return data_; }

 private:
  uint8_t* pages_;
  size_t mapped_bytes_;
  uint8_t* data_;
};

}  // namespace optstate::kernels

#endif  // OPTSTATE_KERNELS_CPU_GUARDED_INPUT_H_
