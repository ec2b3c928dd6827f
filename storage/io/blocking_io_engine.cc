#include "storage/io/blocking_io_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "storage/io/disk_files.h"
#include "storage/io/request_queue.h"
#include "storage/io/request_rules.h"

namespace optstate::io {
namespace {

// Submit() collects requests; Poll() hands them to the threads, so that a lock
// is taken once for many, and urgent ones among them go first.
class BlockingIoEngine final : public IoEngine {
 public:
  explicit BlockingIoEngine(const IoEngineOptions& options)
      : hook_(options.hook), files_(options.lock_wait, options.log) {
    CheckOrDie(options.queue_depth >= 1 && options.threads >= 1,
               "queue_depth and threads are at least 1");
    const int threads = std::min(options.threads, options.queue_depth);
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }

  ~BlockingIoEngine() override {
    {
      const absl::MutexLock lock(&mutex_);
      stopped_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }

  absl::StatusOr<FileId> Open(const std::string& path, uint64_t bytes,
                              OpenMode mode) override {
    return files_.Open(path, bytes, mode);
  }
  absl::StatusOr<FileId> OpenExtent(const std::string& device,
                                    const Extent& extent) override {
    return files_.OpenExtent(device, extent);
  }
  void Close(FileId file) override { files_.Close(file); }
  absl::Status Remove(const std::string& path) override {
    return DiskFiles::Remove(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return DiskFiles::Rename(from, to);
  }
  void RegisterMemory(absl::Span<std::byte> memory) override {
    CheckMemory(memory);
  }

  void Submit(IoRequest* request) override {
    CheckRequest(*request, files_.Get(request->file).range);
    request->done_bytes = 0;
    submitted_.PushBack(request);
    ++in_flight_;
  }

  size_t Poll(absl::Span<IoRequest*> completed, bool wait) override {
    CheckOrDie(!completed.empty(), "Poll() has no place for a request");
    const absl::MutexLock lock(&mutex_);
    waiting_.Append(&submitted_);
    if (wait && in_flight_ > 0) {
      mutex_.Await(absl::Condition(this, &BlockingIoEngine::MayReturn));
    }
    woken_ = false;
    size_t count = 0;
    while (count < completed.size()) {
      IoRequest* const request = completed_.Pop();
      if (request == nullptr) break;
      completed[count++] = request;
    }
    in_flight_ -= count;
    return count;
  }

  void Wake() override {
    const absl::MutexLock lock(&mutex_);
    woken_ = true;
  }

  size_t in_flight() const override { return in_flight_; }
  const char* name() const override { return "blocking"; }

 private:
  bool MayReturn() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return woken_ || !completed_.empty();
  }
  bool HasWork() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopped_ || !waiting_.empty();
  }

  // Takes requests, the most urgent first, until the engine is destroyed.
  void Run() {
    for (;;) {
      mutex_.LockWhen(absl::Condition(this, &BlockingIoEngine::HasWork));
      IoRequest* const request = stopped_ ? nullptr : waiting_.Pop();
      mutex_.Unlock();
      if (request == nullptr) return;
      Execute(request);
      const absl::MutexLock lock(&mutex_);
      completed_.PushBack(request);
    }
  }

  void Execute(IoRequest* request) const {
    const DiskFile& file = files_.Get(request->file);
    CallOutcome outcome;
    do {
      RequestRest rest = RestOf(*request);
      if (hook_ != nullptr) rest.bytes = hook_->OnBegin(*request, rest.bytes);
      int64_t result = Call(file.fd.get(), request->kind, rest);
      if (hook_ != nullptr) result = hook_->OnEnd(*request, result);
      outcome = TakeResult(result, file.path, request);
    } while (outcome == CallOutcome::kAgain);
  }

  // Returns a number of bytes or a negative errno.
  static int64_t Call(int fd, IoRequest::Kind kind, const RequestRest& rest) {
    const auto offset = static_cast<off_t>(rest.offset_bytes);
    ssize_t result = 0;
    switch (kind) {
      case IoRequest::Kind::kRead:
        result = ::pread(fd, rest.data, rest.bytes, offset);
        break;
      case IoRequest::Kind::kWrite:
        result = ::pwrite(fd, rest.data, rest.bytes, offset);
        break;
      case IoRequest::Kind::kSync:
        result = ::fdatasync(fd);
        break;
    }
    return result < 0 ? -int64_t{errno} : result;
  }

  IoHook* const hook_;
  DiskFiles files_;
  // Requests that no Poll() has handed over.
  PriorityQueues submitted_;
  size_t in_flight_ = 0;

  absl::Mutex mutex_;
  PriorityQueues waiting_ ABSL_GUARDED_BY(mutex_);
  RequestQueue completed_ ABSL_GUARDED_BY(mutex_);
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> MakeBlockingIoEngine(const IoEngineOptions& options) {
  return std::make_unique<BlockingIoEngine>(options);
}

}  // namespace optstate::io
