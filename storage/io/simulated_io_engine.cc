#include "storage/io/simulated_io_engine.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "storage/io/request_queue.h"
#include "storage/io/request_rules.h"

namespace optstate::io {

// The time that passes in a Poll() that does not wait.
constexpr uint64_t kPollUs = 10;

class SimulatedIoEngine final : public IoEngine {
 public:
  SimulatedIoEngine(SimulatedDisk* disk, int queue_depth, IoHook* hook)
      : disk_(disk),
        queue_depth_(static_cast<size_t>(queue_depth)),
        hook_(hook) {
    CheckOrDie(queue_depth >= 1, "queue_depth is at least 1");
  }

  ~SimulatedIoEngine() override {
    while (!calls_.empty()) disk_->EndCall(TakeNext().call);
    for (const OpenFile& file : files_) Unlock(file);
  }

  absl::StatusOr<FileId> Open(const std::string& path, uint64_t bytes,
                              OpenMode mode) override {
    CheckOrDie(mode == OpenMode::kOpen || bytes % kSectorBytes == 0,
               "a file's size is not a multiple of kSectorBytes");
    auto file = disk_->Open(path, bytes, mode);
    if (!file.ok()) return file.status();
    const uint64_t size = (*file)->content.bytes();
    files_.push_back({*std::move(file), path, {0, size}});
    return FileId{static_cast<int>(files_.size()) - 1};
  }
  absl::StatusOr<FileId> OpenExtent(const std::string& device,
                                    const Extent& extent) override {
    auto file = disk_->OpenExtent(device, extent);
    if (!file.ok()) return file.status();
    files_.push_back({*std::move(file), device, extent});
    return FileId{static_cast<int>(files_.size()) - 1};
  }
  void Close(FileId file) override {
    Unlock(At(file));
    files_[file.index] = {};
  }
  absl::Status Remove(const std::string& path) override {
    return disk_->Remove(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return disk_->Rename(from, to);
  }
  void RegisterMemory(absl::Span<std::byte> memory) override {
    CheckMemory(memory);
  }

  void Submit(IoRequest* request) override {
    const OpenFile& file = At(request->file);
    CheckRequest(*request, file.range);
    request->done_bytes = 0;
    if (request->kind == IoRequest::Kind::kSync) {
      sync_marks_[request] = file.file->content.SyncMark();
    }
    waiting_.PushBack(request);
    ++in_flight_;
  }

  size_t Poll(absl::Span<IoRequest*> completed, bool wait) override {
    CheckOrDie(!completed.empty(), "Poll() has no place for a request");
    Issue();
    if (!wait) disk_->now_us_ += kPollUs;
    size_t count = 0;
    bool woken = woken_.exchange(false);
    for (;;) {
      count += EndDueCalls(completed.subspan(count));
      Issue();
      woken = woken_.exchange(false) || woken;
      if (!wait || woken || count > 0 || calls_.empty()) break;
      disk_->now_us_ = std::max(disk_->now_us_, Next()->call.due_us);
    }
    in_flight_ -= count;
    return count;
  }

  void Wake() override { woken_ = true; }

  size_t in_flight() const override { return in_flight_; }
  const char* name() const override { return "simulated"; }

 private:
  struct OpenFile {
    std::shared_ptr<SimulatedDisk::File> file;
    std::string path;
    Extent range;  // locked
  };
  struct PendingCall {
    IoRequest* request = nullptr;
    SimulatedDisk::Call call;
  };

  static void Unlock(const OpenFile& file) {
    if (file.file == nullptr) return;
    std::vector<Extent>& locked = file.file->locked;
    const auto own = std::find(locked.begin(), locked.end(), file.range);
    if (own != locked.end()) locked.erase(own);
  }

  const OpenFile& At(FileId file) const {
    CheckOrDie(file.index >= 0 &&
                   static_cast<size_t>(file.index) < files_.size() &&
                   files_[file.index].file != nullptr,
               "a file is not open");
    return files_[file.index];
  }

  void Issue() {
    while (calls_.size() < queue_depth_) {
      IoRequest* const request = waiting_.Pop();
      if (request == nullptr) return;
      RequestRest rest = RestOf(*request);
      if (hook_ != nullptr) rest.bytes = hook_->OnBegin(*request, rest.bytes);
      calls_.push_back({request, Begin(*request, rest)});
    }
  }

  SimulatedDisk::Call Begin(const IoRequest& request, const RequestRest& rest) {
    const OpenFile& file = At(request.file);
    SimulatedDisk::Call call;
    call.kind = request.kind;
    call.file = file.file;
    call.path = file.path;
    call.offset = rest.offset_bytes;
    call.data = absl::MakeSpan(rest.data, rest.bytes);
    if (request.kind == IoRequest::Kind::kSync) {
      call.sync_mark = sync_marks_.at(&request);
    }
    return disk_->BeginCall(std::move(call));
  }

  // Returns the call that ends first; of equals, the one that began first.
  std::vector<PendingCall>::iterator Next() {
    return std::min_element(calls_.begin(), calls_.end(),
                            [](const PendingCall& a, const PendingCall& b) {
                              return a.call.due_us < b.call.due_us;
                            });
  }
  PendingCall TakeNext() {
    const auto next = Next();
    PendingCall taken = std::move(*next);
    calls_.erase(next);
    return taken;
  }

  // Ends calls whose time has come until `completed` is full.
  size_t EndDueCalls(absl::Span<IoRequest*> completed) {
    size_t count = 0;
    while (count < completed.size() && !calls_.empty() &&
           Next()->call.due_us <= disk_->now_us_) {
      const PendingCall pending = TakeNext();
      IoRequest* const request = pending.request;
      int64_t result = disk_->EndCall(pending.call);
      if (hook_ != nullptr) result = hook_->OnEnd(*request, result);
      if (TakeResult(result, At(request->file).path, request) ==
          CallOutcome::kAgain) {
        waiting_.PushFront(request);
      } else {
        sync_marks_.erase(request);
        completed[count++] = request;
      }
    }
    return count;
  }

  SimulatedDisk* const disk_;
  const size_t queue_depth_;
  IoHook* const hook_;
  std::vector<OpenFile> files_;
  PriorityQueues waiting_;
  std::vector<PendingCall> calls_;  // in the order in which they began
  // The writes that had ended when a sync was submitted, which it covers. The
  // kernel may do more.
  std::map<const IoRequest*, uint64_t> sync_marks_;
  size_t in_flight_ = 0;
  std::atomic<bool> woken_ = false;
};

std::unique_ptr<IoEngine> MakeSimulatedIoEngine(SimulatedDisk* disk,
                                                int queue_depth, IoHook* hook) {
  return std::make_unique<SimulatedIoEngine>(disk, queue_depth, hook);
}

}  // namespace optstate::io
