#include "storage/io/shared_io_engine.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "storage/io/request_queue.h"

namespace optstate::io {
namespace {

// The bytes that all processes have under way when several use the disks:
// enough to keep these busy, and little enough to wait behind.
constexpr double kSharedBytes = 24 << 20;

class SharedIoEngine final : public IoEngine {
 public:
  SharedIoEngine(std::unique_ptr<IoEngine> engine,
                 std::unique_ptr<DiskShare> share)
      : engine_(std::move(engine)), share_(std::move(share)) {}

  absl::StatusOr<FileId> Open(const std::string& path, uint64_t bytes,
                              OpenMode mode) override {
    return engine_->Open(path, bytes, mode);
  }
  absl::StatusOr<FileId> OpenExtent(const std::string& device,
                                    const Extent& extent) override {
    return engine_->OpenExtent(device, extent);
  }
  void Close(FileId file) override { engine_->Close(file); }
  absl::Status Remove(const std::string& path) override {
    return engine_->Remove(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return engine_->Rename(from, to);
  }
  void RegisterMemory(absl::Span<std::byte> memory) override {
    engine_->RegisterMemory(memory);
  }
  void Submit(IoRequest* request) override {
    waiting_.PushBack(request);
    ++waiting_count_;
    PassOn();
  }
  size_t Poll(absl::Span<IoRequest*> completed, bool wait) override {
    PassOn();
    const size_t count = engine_->Poll(completed, wait);
    for (const IoRequest* request : completed.first(count)) {
      bytes_under_way_ -= request->buffer.size();
    }
    return count;
  }
  void Wake() override { engine_->Wake(); }
  size_t in_flight() const override {
    return engine_->in_flight() + waiting_count_;
  }
  const char* name() const override { return engine_->name(); }

 private:
  // Gives the engine the requests for which there is room.
  void PassOn() {
    if (in_flight() == 0) return;
    const int64_t now_ns =
        std::chrono::duration_cast<std::chrono::nanoseconds>(
            std::chrono::steady_clock::now().time_since_epoch())
            .count();
    share_->NoteActive(now_ns);
    if (waiting_count_ == 0) return;
    const double part = share_->Part(now_ns);
    while (waiting_count_ > 0 &&
           (part == 1 || engine_->in_flight() == 0 ||
            static_cast<double>(bytes_under_way_) < part * kSharedBytes)) {
      IoRequest* const request = waiting_.Pop();
      --waiting_count_;
      bytes_under_way_ += request->buffer.size();
      engine_->Submit(request);
    }
  }

  const std::unique_ptr<IoEngine> engine_;
  const std::unique_ptr<DiskShare> share_;
  PriorityQueues waiting_;
  size_t waiting_count_ = 0;
  uint64_t bytes_under_way_ = 0;
};

}  // namespace

std::unique_ptr<IoEngine> ShareIoEngine(std::unique_ptr<IoEngine> engine,
                                        std::unique_ptr<DiskShare> share) {
  return std::make_unique<SharedIoEngine>(std::move(engine), std::move(share));
}

}  // namespace optstate::io
