#include "storage/io/io_uring_io_engine.h"

#include <liburing.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/unique_fd.h"
#include "storage/io/disk_files.h"
#include "storage/io/registered_memory.h"
#include "storage/io/request_queue.h"
#include "storage/io/request_rules.h"

namespace optstate::io {
namespace {

// Files with a smaller index are registered, so that a request need not look
// its descriptor up. Others work by their descriptor.
constexpr unsigned kRegisteredFiles = 64;

// One call transfers at most this much; the kernel counts in 32 bits.
constexpr uint64_t kCallBytes = uint64_t{1} << 30;

const char* LikelyCause(int error_number) {
  switch (error_number) {
    case EPERM:
    case EACCES:
      return "a seccomp filter or kernel.io_uring_disabled forbids it";
    case ENOSYS:
      return "the kernel is too old or has no io_uring, or a seccomp filter "
             "hides it";
    case EINVAL:
      return "the kernel is too old";
    case ENOMEM:
      return "RLIMIT_MEMLOCK is too low";
    default:
      return "no known cause";
  }
}

absl::Status Refused(int error_number, const char* call) {
  return OsError(error_number,
                 absl::StrCat(call, " (", LikelyCause(error_number), ")"));
}

// Entries of the submission queue lie between Poll() and the kernel; the kernel
// has at most queue_depth requests, and one read of the eventfd on top of them.
class IoUringIoEngine final : public IoEngine {
 public:
  explicit IoUringIoEngine(const IoEngineOptions& options)
      : queue_depth_(static_cast<size_t>(options.queue_depth)),
        hook_(options.hook),
        log_(options.log),
        files_(options.lock_wait, options.log),
        memory_(options.registered_piece_bytes) {
    CheckOrDie(options.queue_depth >= 1, "queue_depth is at least 1");
    CheckOrDie(options.registered_piece_bytes > 0 &&
                   options.registered_piece_bytes % kSectorBytes == 0,
               "registered_piece_bytes is not a multiple of kSectorBytes");
  }

  absl::Status Init(bool submission_thread) {
    wake_fd_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
    if (!wake_fd_.ok()) return OsError(errno, "eventfd");
    io_uring_params params = {};
    if (submission_thread) params.flags |= IORING_SETUP_SQPOLL;
    int result = io_uring_queue_init_params(
        static_cast<unsigned>(queue_depth_ + 1), &ring_, &params);
    if (result < 0) return Refused(-result, "io_uring_setup");
    ring_is_open_ = true;
    absl::Status supported = CheckOperations();
    if (!supported.ok()) return supported;
    const std::vector<int> none(kRegisteredFiles, -1);
    result = io_uring_register_files(&ring_, none.data(), kRegisteredFiles);
    files_are_registered_ = result == 0;
    if (result < 0) Log("without registered files", -result);
    return absl::OkStatus();
  }

  ~IoUringIoEngine() override {
    if (!ring_is_open_) return;
    // The read of the eventfd is over too: it writes to this object.
    if (wake_is_armed_) SignalWake();
    while (with_kernel_ > 0 || wake_is_armed_) {
      Enter(1);
      Reap({}, /*resume=*/false);
    }
    io_uring_queue_exit(&ring_);
  }

  absl::StatusOr<FileId> Open(const std::string& path, uint64_t bytes,
                              OpenMode mode) override {
    return Register(files_.Open(path, bytes, mode));
  }
  absl::StatusOr<FileId> OpenExtent(const std::string& device,
                                    const Extent& extent) override {
    return Register(files_.OpenExtent(device, extent));
  }
  void Close(FileId file) override {
    SetRegisteredFile(file, -1);
    files_.Close(file);
  }
  absl::Status Remove(const std::string& path) override {
    return DiskFiles::Remove(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return DiskFiles::Rename(from, to);
  }
  void RegisterMemory(absl::Span<std::byte> memory) override {
    CheckMemory(memory);
    const int error_number = memory_.Register(&ring_, memory);
    if (error_number != 0) Log("without registered buffers", error_number);
  }

  void Submit(IoRequest* request) override {
    CheckRequest(*request, files_.Get(request->file).range);
    request->done_bytes = 0;
    waiting_.PushBack(request);
    ++in_flight_;
  }

  size_t Poll(absl::Span<IoRequest*> completed, bool wait) override {
    CheckOrDie(!completed.empty(), "Poll() has no place for a request");
    for (;;) {
      ArmWake();
      // Room in the kernel comes first, so that the disk works on while the
      // caller looks at what is completed.
      size_t count = Reap(completed, /*resume=*/true);
      Issue();
      if (io_uring_sq_ready(&ring_) > 0) Enter(0);
      if (count == 0) count = Reap(completed, /*resume=*/true);
      if (woken_.exchange(false) || count > 0 || in_flight_ == 0 || !wait) {
        in_flight_ -= count;
        return count;
      }
      if (IsIdle()) Enter(1);
    }
  }

  void Wake() override {
    if (!woken_.exchange(true)) SignalWake();
  }

  size_t in_flight() const override { return in_flight_; }
  const char* name() const override { return "io_uring"; }

 private:
  // Returns whether nothing is left to do but to wait for the kernel.
  bool IsIdle() {
    return wake_is_armed_ && io_uring_sq_ready(&ring_) == 0 &&
           io_uring_cq_ready(&ring_) == 0 &&
           (waiting_.empty() || with_kernel_ == queue_depth_);
  }

  void Log(const char* without, int error_number) {
    if (!log_) return;
    log_(absl::StrCat("io_uring works ", without, ": ",
                      std::strerror(error_number), " (",
                      LikelyCause(error_number), ")"));
  }

  absl::Status CheckOperations() {
    io_uring_probe* const probe = io_uring_get_probe_ring(&ring_);
    if (probe == nullptr) return Refused(EINVAL, "io_uring_register(probe)");
    int missing = -1;
    for (const int operation :
         {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED,
          IORING_OP_WRITE_FIXED, IORING_OP_FSYNC}) {
      if (!io_uring_opcode_supported(probe, operation)) missing = operation;
    }
    io_uring_free_probe(probe);
    if (missing < 0) return absl::OkStatus();
    return Refused(ENOSYS, "io_uring operation");
  }

  absl::StatusOr<FileId> Register(absl::StatusOr<FileId> file) {
    if (file.ok()) SetRegisteredFile(*file, files_.Get(*file).fd.get());
    return file;
  }

  void SetRegisteredFile(FileId file, int fd) {
    if (!IsRegistered(file)) return;
    const int result = io_uring_register_files_update(
        &ring_, static_cast<unsigned>(file.index), &fd, 1);
    CheckOrDie(result == 1, absl::StrCat("io_uring_register_files_update: ",
                                         std::strerror(-result)));
  }
  bool IsRegistered(FileId file) const {
    return files_are_registered_ &&
           static_cast<unsigned>(file.index) < kRegisteredFiles;
  }

  // Gives waiting requests to the submission queue while the bound permits.
  void Issue() {
    while (with_kernel_ < queue_depth_) {
      IoRequest* const request = waiting_.Pop();
      if (request == nullptr) return;
      io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) {
        waiting_.PushFront(request);
        return;
      }
      Prepare(request, entry);
      ++with_kernel_;
    }
  }

  void Prepare(IoRequest* request, io_uring_sqe* entry) {
    RequestRest rest = RestOf(*request);
    const RegisteredMemory::Part part = memory_.Find(rest.data, rest.bytes);
    rest.bytes = std::min(part.bytes, kCallBytes);
    if (hook_ != nullptr) rest.bytes = hook_->OnBegin(*request, rest.bytes);
    const bool registered = IsRegistered(request->file);
    const int fd =
        registered ? request->file.index : files_.Get(request->file).fd.get();
    const auto bytes = static_cast<unsigned>(rest.bytes);
    const bool fixed = part.piece >= 0;
    switch (request->kind) {
      case IoRequest::Kind::kRead:
        if (fixed) {
          io_uring_prep_read_fixed(entry, fd, rest.data, bytes,
                                   rest.offset_bytes, part.piece);
        } else {
          io_uring_prep_read(entry, fd, rest.data, bytes, rest.offset_bytes);
        }
        break;
      case IoRequest::Kind::kWrite:
        if (fixed) {
          io_uring_prep_write_fixed(entry, fd, rest.data, bytes,
                                    rest.offset_bytes, part.piece);
        } else {
          io_uring_prep_write(entry, fd, rest.data, bytes, rest.offset_bytes);
        }
        break;
      case IoRequest::Kind::kSync:
        io_uring_prep_fsync(entry, fd, IORING_FSYNC_DATASYNC);
        break;
    }
    if (registered) entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(entry, request);
  }

  // Takes results off the completion queue until `completed` is full, and
  // returns how many requests are in it. Without `resume`, requests end with
  // the call that they have under way, and are not returned.
  size_t Reap(absl::Span<IoRequest*> completed, bool resume) {
    size_t count = 0;
    io_uring_cqe* entry = nullptr;
    while ((!resume || count < completed.size()) &&
           io_uring_peek_cqe(&ring_, &entry) == 0) {
      auto* const request =
          static_cast<IoRequest*>(io_uring_cqe_get_data(entry));
      int64_t result = entry->res;
      io_uring_cqe_seen(&ring_, entry);
      if (request == nullptr) {
        wake_is_armed_ = false;
        continue;
      }
      --with_kernel_;
      if (!resume) continue;
      if (hook_ != nullptr) result = hook_->OnEnd(*request, result);
      const std::string& path = files_.Get(request->file).path;
      if (TakeResult(result, path, request) == CallOutcome::kAgain) {
        // The request had its turn, and keeps it before others of its class.
        waiting_.PushFront(request);
      } else {
        completed[count++] = request;
      }
    }
    return count;
  }

  // Gives the submission queue to the kernel, and waits for `completions`.
  void Enter(unsigned completions) {
    const int result = completions == 0
                           ? io_uring_submit(&ring_)
                           : io_uring_submit_and_wait(&ring_, completions);
    if (result >= 0 || result == -EINTR) return;
    // The kernel is out of memory for a moment, or wants its results to be
    // taken first.
    CheckOrDie(result == -EAGAIN || result == -EBUSY || result == -ENOMEM,
               absl::StrCat("io_uring_enter: ", std::strerror(-result)));
    ::sched_yield();
  }

  // Keeps one read of the eventfd in the ring.
  void ArmWake() {
    if (wake_is_armed_) return;
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return;  // Poll() tries again before it sleeps
    io_uring_prep_read(entry, wake_fd_.get(), &wake_count_, sizeof(wake_count_),
                       0);
    io_uring_sqe_set_data(entry, nullptr);
    wake_is_armed_ = true;
  }
  void SignalWake() {
    const uint64_t one = 1;
    // This write cannot fail: one Wake() at a time is not yet taken.
    const ssize_t written = ::write(wake_fd_.get(), &one, sizeof(one));
    CheckOrDie(written == sizeof(one), "write to the eventfd failed");
  }

  const size_t queue_depth_;
  IoHook* const hook_;
  const std::function<void(const std::string&)> log_;
  DiskFiles files_;
  UniqueFd wake_fd_;
  io_uring ring_ = {};
  bool ring_is_open_ = false;
  bool files_are_registered_ = false;
  RegisteredMemory memory_;

  PriorityQueues waiting_;
  size_t in_flight_ = 0;
  size_t with_kernel_ = 0;

  // Set by Wake(), cleared by the Poll() that returns for it. The eventfd only
  // ends its sleep.
  std::atomic<bool> woken_ = false;
  bool wake_is_armed_ = false;
  uint64_t wake_count_ = 0;  // the kernel writes it
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoEngine>> MakeIoUringIoEngine(
    const IoEngineOptions& options) {
  auto engine = std::make_unique<IoUringIoEngine>(options);
  const absl::Status status = engine->Init(options.submission_thread);
  if (!status.ok()) return status;
  return engine;
}

}  // namespace optstate::io
