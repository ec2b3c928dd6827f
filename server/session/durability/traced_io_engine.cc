#include "server/session/durability/traced_io_engine.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "proto/types/status_macros.h"
#include "server/config/nvme_directory.h"

namespace optstate::session {
namespace {

// In the order of IoRequest::Kind: the spans' names, and those of their lanes.
constexpr const char* kSpanNames[] = {"read", "write", "sync"};
constexpr const char* kLaneNames[] = {"reads", "writes", "syncs"};
constexpr uint32_t kKinds = 3;

absl::string_view FolderOf(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == absl::string_view::npos || slash == 0 ? absl::string_view("/")
                                                        : path.substr(0, slash);
}

// The directories of an engine's files, numbered as they come.
//
// Threads: thread-safe.
class Directories {
 public:
  explicit Directories(const v1::NvmeSettings& nvme) : nvme_(nvme) {}

  // Returns the number of the directory that a file is in.
  uint32_t OfFile(const std::string& path) {
    for (const std::string& directory : nvme_.directories()) {
      if (absl::StartsWith(path, absl::StrCat(directory, "/"))) {
        return NumberOf(directory);
      }
    }
    return NumberOf(std::string(FolderOf(path)));
  }
  // Returns that of the directory whose records are on the device.
  uint32_t OfDevice(const std::string& device) {
    for (const std::string& directory : nvme_.directories()) {
      if (config::DeviceOf(nvme_, directory) == device) {
        return NumberOf(directory);
      }
    }
    return NumberOf(device);
  }
  std::string Name(uint32_t number) const {
    const absl::MutexLock lock(&mu_);
    return names_[number];
  }

 private:
  uint32_t NumberOf(const std::string& name) {
    const absl::MutexLock lock(&mu_);
    const auto found = std::find(names_.begin(), names_.end(), name);
    const auto number = static_cast<uint32_t>(found - names_.begin());
    if (found == names_.end()) names_.push_back(name);
    return number;
  }

  const v1::NvmeSettings nvme_;
  mutable absl::Mutex mu_;
  std::vector<std::string> names_ ABSL_GUARDED_BY(mu_);
};

class TracedIoEngine final : public io::IoEngine {
 public:
  TracedIoEngine(std::unique_ptr<io::IoEngine> engine,
                 const v1::NvmeSettings& nvme, observe::TraceRecorder* trace)
      : directories_(nvme),
        spans_(trace,
               [this](uint32_t lane) -> observe::LaneName {
                 return {"disks",
                         absl::StrCat(kLaneNames[lane % kKinds], " of ",
                                      directories_.Name(lane / kKinds))};
               }),
        engine_(std::move(engine)) {}

  absl::StatusOr<io::FileId> Open(const std::string& path, uint64_t bytes,
                                  OpenMode mode) override {
    OPTSTATE_ASSIGN_OR_RETURN(const io::FileId file,
                              engine_->Open(path, bytes, mode));
    Note(file, directories_.OfFile(path));
    return file;
  }
  absl::StatusOr<io::FileId> OpenExtent(const std::string& device,
                                        const io::Extent& extent) override {
    OPTSTATE_ASSIGN_OR_RETURN(const io::FileId file,
                              engine_->OpenExtent(device, extent));
    Note(file, directories_.OfDevice(device));
    return file;
  }
  void Close(io::FileId file) override { engine_->Close(file); }
  absl::Status Remove(const std::string& path) override {
    return engine_->Remove(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return engine_->Rename(from, to);
  }
  void RegisterMemory(absl::Span<std::byte> memory) override {
    engine_->RegisterMemory(memory);
  }
  void Submit(io::IoRequest* request) override {
    request->submitted_ns = spans_.Begin();
    engine_->Submit(request);
  }
  size_t Poll(absl::Span<io::IoRequest*> completed, bool wait) override {
    const size_t count = engine_->Poll(completed, wait);
    if (!spans_.on()) return count;
    const int64_t now_ns = observe::TraceNowNs();
    for (const io::IoRequest* request : completed.first(count)) {
      Record(*request, now_ns);
    }
    return count;
  }
  void Wake() override { engine_->Wake(); }
  size_t in_flight() const override { return engine_->in_flight(); }
  const char* name() const override { return engine_->name(); }

 private:
  void Note(io::FileId file, uint32_t directory) {
    const auto index = static_cast<size_t>(file.index);
    if (directory_of_.size() <= index) directory_of_.resize(index + 1);
    directory_of_[index] = directory;
  }
  // A read that comes ahead of its step is of none in particular.
  void Record(const io::IoRequest& request, int64_t now_ns) {
    if (request.submitted_ns == 0) return;  // before the trace
    const auto kind = static_cast<uint32_t>(request.kind);
    const uint32_t directory =
        directory_of_[static_cast<size_t>(request.file.index)];
    spans_.Record({.name = kSpanNames[kind],
                   .lane = directory * kKinds + kind,
                   .begin_ns = request.submitted_ns,
                   .end_ns = now_ns,
                   .step = 0,
                   .bytes = request.status.ok() ? request.buffer.size() : 0});
  }

  Directories directories_;
  observe::TraceSource spans_;
  std::vector<uint32_t> directory_of_;  // by FileId::index
  const std::unique_ptr<io::IoEngine> engine_;
};

}  // namespace

std::unique_ptr<io::IoEngine> TraceIoEngine(
    std::unique_ptr<io::IoEngine> engine, const v1::NvmeSettings& nvme,
    observe::TraceRecorder* trace) {
  return std::make_unique<TracedIoEngine>(std::move(engine), nvme, trace);
}

}  // namespace optstate::session
