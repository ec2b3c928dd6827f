#include "storage/tiers/nvme/io_thread.h"

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace optstate::nvme {

void IoThread::Start() {
  {
    const absl::MutexLock lock(&monitor_.mu);
    monitor_.stop = false;
  }
  thread_ = std::thread([this] { Run(); });
}

void IoThread::Stop() {
  {
    const absl::MutexLock lock(&monitor_.mu);
    monitor_.stop = true;
    monitor_.Wake();
  }
  if (thread_.joinable()) thread_.join();
}

void IoThread::Run() {
  std::array<io::IoRequest*, 64> completed;
  io::IoEngine& engine = context_.engine;
  const absl::MutexLock lock(&monitor_.mu);
  monitor_.counters.SetIoThread();
  while (true) {
    monitor_.has_work = false;
    if (!monitor_.stop && monitor_.failed.ok()) Schedule();
    const bool is_idle = engine.in_flight() == 0;
    if (monitor_.stop && is_idle) {
      monitor_.counters.EndIoThread();
      return;
    }
    if (is_idle && !swapper_.has_unsummed()) {
      while (!monitor_.has_work && !monitor_.stop) {
        monitor_.work.Wait(&monitor_.mu);
      }
      continue;
    }
    // The kernel gets what was submitted before checksums are taken.
    const bool waits = !swapper_.has_unsummed();
    monitor_.is_polling = true;
    monitor_.mu.Unlock();
    const size_t count = engine.Poll(absl::MakeSpan(completed), waits);
    monitor_.mu.Lock();
    monitor_.is_polling = false;
    for (size_t i = 0; i < count; ++i) Complete(completed[i]);
    if (count > 0) monitor_.changed.SignalAll();
    if (swapper_.has_unsummed()) swapper_.SumOneAndWrite();
  }
}

void IoThread::Schedule() {
  committer_.Advance();
  swapper_.Flush();
  swapper_.Vacate();
  swapper_.ReadDemanded();
  parameters_.StartDemanded();
  swapper_.ReadAhead();
  swapper_.WriteBehind();
  parameters_.StartAhead();
  mover_.Start();
  verifier_.Start();
}

void IoThread::Complete(io::IoRequest* request) {
  if (mover_.Owns(request)) {
    const uint32_t frame = mover_.Complete(request);
    if (frame != RecordCache::kNoFrame) swapper_.CompleteMirror(frame);
    return;
  }
  monitor_.io_counters.OnComplete(context_.DirectoryOf(request->file),
                                  *request);
  if (verifier_.Owns(request)) return verifier_.Complete();
  if (parameters_.Owns(request)) return parameters_.Complete(request);
  const uint32_t frame = cache_.FrameOf(request);
  if (frame == RecordCache::kNoFrame) return committer_.Complete(*request);
  swapper_.Complete(frame);
}

}  // namespace optstate::nvme
