#ifndef OPTSTATE_STORAGE_TESTING_EVICTING_STORE_H_
#define OPTSTATE_STORAGE_TESTING_EVICTING_STORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "storage/state_store.h"
#include "storage/tiers/host_store.h"

namespace optstate::storage {

// A store for tests of its users. Records lie in memory whole, as a HostStore's
// do, but can be used in frames only, so that nothing can lean on what stays in
// memory:
// - A pinned record is in a frame, chosen at random. Where it was it is
//   overwritten with garbage.
// - A record without a pin is evicted at random: it is written back, and its
//   frame is overwritten. An address kept beyond the pin reads garbage.
// - Frames are filled late: those that a pass asks for ahead, and others at
//   random, by another thread and not in the order of requests. A pass visits
//   the records in a random order and asks for some ahead.
// - A record that is overwritten begins as zeros, or as it was.
//
// Frames are a file, which outlives a process that is killed: the next store of
// the same path and incarnation goes on with what is in them. Seeds are the
// caller's to print.
//
// Allocates only while it is being opened.
//
// Threads: see StateStore; one thread of its own fills frames.
class EvictingStore final : public StateStore {
 public:
  struct Options {
    std::string path;  // of the frames; made when it is not there
    // The job to which the frames belong: those of another one are dropped.
    uint64_t incarnation = 0;
    uint64_t seed = 0;
  };
  // Value of each byte of what must not be read: floats are NaN.
  static constexpr std::byte kGarbage{0xff};

  // Returns FAILED_PRECONDITION when a killed process has left records of
  // another shape of the job in frames. See StateStore() for the rest.
  static absl::StatusOr<std::unique_ptr<EvictingStore>> Open(
      const Layout* layout, uint64_t sub_group_elements,
      const StateMemory& memory, const Options& options);
  // Writes all records back. None may be pinned.
  ~EvictingStore() override;

  bool is_resident() const override { return false; }
  absl::Status status() const override { return absl::OkStatus(); }
  absl::StatusOr<size_t> BeginPass(absl::Span<const uint8_t> wanted) override;
  absl::StatusOr<Pin> PinOfPass(size_t position) override;

  // Returns the number of records that were evicted.
  uint64_t evictions() const;

 private:
  static constexpr uint32_t kNoFrame = UINT32_MAX;

  struct Record {
    uint32_t frame = kNoFrame;
    uint32_t pins = 0;
    uint32_t waiters = 0;
    bool is_requested = false;
    bool is_overwritten = false;  // by a thread that waits for it
  };
  // The beginning of the file; the owner of each frame follows.
  struct Header {
    uint64_t incarnation;
    uint64_t records;
    uint64_t frame_bytes;
  };

  EvictingStore(const Layout* layout, uint64_t sub_group_elements,
                const StateMemory& memory, const Options& options);
  absl::StatusOr<Pin> PinRecord(size_t sub_group, Access access) override;
  absl::Status OpenFrames(const Options& options);
  absl::Status Adopt(uint64_t incarnation);

  void Unpin(const RecordView& record, Access access) override;
  void Request(uint32_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Fills frames until the end.
  void Run();
  // Brings a record into a frame, and evicts another one at random.
  void Fill(uint32_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Evict(uint32_t record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns a number below `end`.
  size_t Random(size_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return static_cast<size_t>(random_() % end);
  }

  // Returns the record as it is seen in a frame.
  RecordView ViewAt(uint32_t record, uint32_t frame) const;
  std::byte* FrameAt(uint32_t frame) const {
    return file_.data() + frames_at_ + frame * frame_bytes_;
  }
  Header& header() const { return *reinterpret_cast<Header*>(file_.data()); }
  // Returns the word that names the record, plus one, whose newest values are
  // in the frame; 0: they are where they were.
  std::atomic<uint32_t>& owner(uint32_t frame) const {
    return reinterpret_cast<std::atomic<uint32_t>*>(file_.data() +
                                                    sizeof(Header))[frame];
  }

  const HostStore home_;
  uint64_t frame_bytes_ = 0;  // of the largest record
  uint32_t frames_ = 0;
  uint64_t frames_at_ = 0;  // byte of the file
  absl::Span<std::byte> file_;

  mutable absl::Mutex mu_;
  absl::CondVar filled_;
  absl::CondVar work_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_);
  std::vector<Record> records_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> requested_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> pass_ ABSL_GUARDED_BY(mu_);
  uint64_t evictions_ ABSL_GUARDED_BY(mu_) = 0;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread filler_;
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_TESTING_EVICTING_STORE_H_
