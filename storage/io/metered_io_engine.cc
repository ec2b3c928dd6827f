#include "storage/io/metered_io_engine.h"

#include <cstddef>
#include <string>
#include <utility>

namespace optstate::io {
namespace {

class MeteredIoEngine final : public IoEngine {
 public:
  MeteredIoEngine(std::unique_ptr<IoEngine> engine,
                  std::atomic<uint64_t>* done_bytes)
      : engine_(std::move(engine)), done_bytes_(*done_bytes) {}

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
  void Submit(IoRequest* request) override { engine_->Submit(request); }
  size_t Poll(absl::Span<IoRequest*> completed, bool wait) override {
    const size_t count = engine_->Poll(completed, wait);
    uint64_t bytes = 0;
    for (const IoRequest* request : completed.first(count)) {
      if (request->status.ok()) bytes += request->buffer.size();
    }
    done_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    return count;
  }
  void Wake() override { engine_->Wake(); }
  size_t in_flight() const override { return engine_->in_flight(); }
  const char* name() const override { return engine_->name(); }

 private:
  const std::unique_ptr<IoEngine> engine_;
  std::atomic<uint64_t>& done_bytes_;
};

}  // namespace

std::unique_ptr<IoEngine> MeterIoEngine(std::unique_ptr<IoEngine> engine,
                                        std::atomic<uint64_t>* done_bytes) {
  return std::make_unique<MeteredIoEngine>(std::move(engine), done_bytes);
}

}  // namespace optstate::io
