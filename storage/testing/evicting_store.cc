#include "storage/testing/evicting_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"

namespace optstate::storage {
namespace {

// More frames than records, so that a record that returns is elsewhere.
constexpr uint32_t kSpareFrames = 4;
// Positions of a pass that are asked for before they are taken.
constexpr size_t kAhead = 4;
// One in so many records is evicted at once when its last pin ends. One in so
// many that are pinned out of memory waits for the thread that fills frames;
// each wait costs a test more time than all the rest of the pin.
constexpr size_t kEvictedOneOf = 4;
constexpr size_t kLateOneOf = 8;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kPageBytes = 4096;

uint64_t RoundUp(uint64_t bytes, uint64_t to) {
  return (bytes + to - 1) / to * to;
}

uint64_t BytesOf(const RecordView& record) {
  uint64_t bytes = 0;
  for (int part = 0; part < kRecordPartCount; ++part) {
    bytes += RoundUp(record.part(part).size(), kAlignment);
  }
  return bytes;
}

// Calls visit(page of `a`, page of `b`) for each part's pages. Some pages of
// arrays in memory are holes of their files: those that stay equal, or zero,
// are not to be stored to.
template <typename Visitor>
void ForEachPage(const RecordView& a, const RecordView& b,
                 const Visitor& visit) {
  for (int part = 0; part < kRecordPartCount; ++part) {
    const absl::Span<std::byte> in_a = a.part(part);
    const absl::Span<std::byte> in_b = b.part(part);
    for (uint64_t at = 0; at < in_a.size(); at += kPageBytes) {
      visit(in_a.subspan(at, kPageBytes), in_b.subspan(at, kPageBytes));
    }
  }
}

void Copy(const RecordView& from, const RecordView& to) {
  ForEachPage(from, to,
              [](absl::Span<std::byte> source, absl::Span<std::byte> target) {
                if (source == target) return;
                std::memcpy(target.data(), source.data(), source.size());
              });
}

bool IsZero(absl::Span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte byte) { return byte == std::byte{0}; });
}

void Spoil(const RecordView& record) {
  ForEachPage(record, record,
              [](absl::Span<std::byte> page, absl::Span<std::byte> /*same*/) {
                if (IsZero(page)) return;
                std::fill(page.begin(), page.end(), EvictingStore::kGarbage);
              });
}

// The stores before it reach memory before those after it, as the next process
// sees them when this one is killed.
//
// This is not PersistInOrder(), whose points are places in the files of a
// daemon: at each a test looks at these files, and fails when no test expects
// it. The frames of this store are a test's own, which no daemon reads; points
// for them would be moments that mean nothing in the tests of order that run
// over this store.
void InOrder() { std::atomic_signal_fence(std::memory_order_seq_cst); }

}  // namespace

EvictingStore::EvictingStore(const Layout* layout, uint64_t sub_group_elements,
                             const StateMemory& memory, const Options& options)
    : StateStore(layout, sub_group_elements, memory),
      home_(layout, sub_group_elements, memory),
      random_(options.seed),
      records_(sub_groups().size()) {
  const auto records = static_cast<uint32_t>(records_.size());
  for (uint32_t i = 0; i < records; ++i) {
    frame_bytes_ = std::max(frame_bytes_, BytesOf(home_.record(i)));
  }
  frames_ = records + kSpareFrames;
  frames_at_ = RoundUp(sizeof(Header) + frames_ * sizeof(uint32_t), kPageBytes);
  free_.reserve(frames_);
  requested_.reserve(records);
  pass_.reserve(records);
}

absl::StatusOr<std::unique_ptr<EvictingStore>> EvictingStore::Open(
    const Layout* layout, uint64_t sub_group_elements,
    const StateMemory& memory, const Options& options) {
  std::unique_ptr<EvictingStore> store(
      new EvictingStore(layout, sub_group_elements, memory, options));
  OPTSTATE_RETURN_IF_ERROR(store->OpenFrames(options));
  store->filler_ = std::thread([run = store.get()] { run->Run(); });
  return store;
}

absl::Status EvictingStore::OpenFrames(const Options& options) {
  const UniqueFd fd(
      ::open(options.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", options.path));
  const auto present = static_cast<uint64_t>(::lseek(fd.get(), 0, SEEK_END));
  const uint64_t bytes = std::max(present, frames_at_ + frames_ * frame_bytes_);
  if (present < bytes &&
      ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return OsError(errno, absl::StrCat("ftruncate ", options.path));
  }
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) {
    return OsError(errno, absl::StrCat("mmap ", options.path));
  }
  file_ = absl::MakeSpan(static_cast<std::byte*>(data), bytes);
  return Adopt(options.incarnation);
}

// Writes back what a killed process had in frames.
absl::Status EvictingStore::Adopt(uint64_t incarnation) {
  const absl::MutexLock lock(&mu_);
  const Header former = header();
  const bool is_same =
      former.records == records_.size() && former.frame_bytes == frame_bytes_;
  if (former.incarnation == incarnation) {
    for (uint32_t frame = 0; frame < former.records + kSpareFrames; ++frame) {
      const uint32_t owned = owner(frame).load(std::memory_order_relaxed);
      if (owned == 0) continue;
      if (!is_same) {
        return absl::FailedPreconditionError(
            "frames: a record of another shape of the job is in one");
      }
      Copy(ViewAt(owned - 1, frame), home_.record(owned - 1));
      InOrder();
      owner(frame).store(0, std::memory_order_relaxed);
    }
  }
  for (uint32_t frame = 0; frame < frames_; ++frame) {
    owner(frame).store(0, std::memory_order_relaxed);
    free_.push_back(frame);
  }
  InOrder();
  header() = {.incarnation = incarnation,
              .records = records_.size(),
              .frame_bytes = frame_bytes_};
  return absl::OkStatus();
}

EvictingStore::~EvictingStore() {
  {
    const absl::MutexLock lock(&mu_);
    stop_ = true;
    work_.SignalAll();
  }
  if (filler_.joinable()) filler_.join();
  if (file_.empty()) return;
  {
    const absl::MutexLock lock(&mu_);
    for (uint32_t i = 0; i < records_.size(); ++i) {
      if (records_[i].frame != kNoFrame) Evict(i);
    }
  }
  ::munmap(file_.data(), file_.size());
}

RecordView EvictingStore::ViewAt(uint32_t record, uint32_t frame) const {
  const RecordView at_home = home_.record(record);
  RecordView::Bases bases;
  std::byte* next = FrameAt(frame);
  for (int part = 0; part < kRecordPartCount; ++part) {
    const uint64_t bytes = at_home.part(part).size();
    if (bytes == 0) continue;
    bases.parts[static_cast<size_t>(part)] = next;
    next += RoundUp(bytes, kAlignment);
  }
  bases.parameter_area = arrays().parameters;
  return {&layout(), &sub_groups()[record], bases};
}

absl::StatusOr<StateStore::Pin> EvictingStore::PinRecord(size_t sub_group,
                                                         Access access) {
  const auto index = static_cast<uint32_t>(sub_group);
  const absl::MutexLock lock(&mu_);
  Record& record = records_[index];
  ++record.waiters;
  while (record.frame == kNoFrame) {
    if (access == Access::kOverwrite) record.is_overwritten = true;
    if (!record.is_requested && Random(kLateOneOf) != 0) {
      Fill(index);
      break;
    }
    Request(index);
    filled_.Wait(&mu_);
  }
  --record.waiters;
  ++record.pins;
  return Pin(ViewAt(index, record.frame), this, access);
}

void EvictingStore::Unpin(const RecordView& view, Access /*access*/) {
  const auto index =
      static_cast<uint32_t>(&view.sub_group() - sub_groups().all().data());
  const absl::MutexLock lock(&mu_);
  Record& record = records_[index];
  if (--record.pins > 0 || record.waiters > 0) return;
  if (Random(kEvictedOneOf) == 0) Evict(index);
}

absl::StatusOr<size_t> EvictingStore::BeginPass(
    absl::Span<const uint8_t> wanted) {
  const absl::MutexLock lock(&mu_);
  pass_.clear();
  for (uint32_t i = 0; i < records_.size(); ++i) {
    if (wanted[i] != 0) pass_.push_back(i);
  }
  std::shuffle(pass_.begin(), pass_.end(), random_);
  for (size_t i = 0; i < std::min(kAhead, pass_.size()); ++i) Request(pass_[i]);
  return pass_.size();
}

absl::StatusOr<StateStore::Pin> EvictingStore::PinOfPass(size_t position) {
  uint32_t record;
  {
    const absl::MutexLock lock(&mu_);
    record = pass_[position];
    if (position + kAhead < pass_.size()) Request(pass_[position + kAhead]);
  }
  return PinRecord(record, Access::kWrite);
}

void EvictingStore::Request(uint32_t index) {
  Record& record = records_[index];
  if (record.frame != kNoFrame || record.is_requested) return;
  record.is_requested = true;
  requested_.push_back(index);
  work_.Signal();
}

// Lets other threads add their requests before it chooses one.
void EvictingStore::Run() {
  const absl::MutexLock lock(&mu_);
  while (!stop_) {
    if (requested_.empty()) {
      work_.Wait(&mu_);
      continue;
    }
    if (Random(kLateOneOf) == 0) {
      mu_.Unlock();
      std::this_thread::yield();
      mu_.Lock();
    }
    std::swap(requested_[Random(requested_.size())], requested_.back());
    const uint32_t record = requested_.back();
    requested_.pop_back();
    Fill(record);
    filled_.SignalAll();
  }
}

void EvictingStore::Fill(uint32_t index) {
  Record& record = records_[index];
  std::swap(free_[Random(free_.size())], free_.back());
  const uint32_t frame = free_.back();
  free_.pop_back();
  const RecordView at_home = home_.record(index);
  if (std::exchange(record.is_overwritten, false) && Random(2) == 0) {
    std::memset(FrameAt(frame), 0, frame_bytes_);
  } else {
    Copy(at_home, ViewAt(index, frame));
  }
  InOrder();
  owner(frame).store(index + 1, std::memory_order_relaxed);
  InOrder();
  Spoil(at_home);
  record.frame = frame;
  record.is_requested = false;
  const auto other = static_cast<uint32_t>(Random(records_.size()));
  const Record& chosen = records_[other];
  if (other != index && chosen.frame != kNoFrame && chosen.pins == 0 &&
      chosen.waiters == 0) {
    Evict(other);
  }
}

void EvictingStore::Evict(uint32_t index) {
  const uint32_t frame = std::exchange(records_[index].frame, kNoFrame);
  const RecordView in_frame = ViewAt(index, frame);
  Copy(in_frame, home_.record(index));
  InOrder();
  owner(frame).store(0, std::memory_order_relaxed);
  InOrder();
  std::memset(FrameAt(frame), static_cast<int>(kGarbage), frame_bytes_);
  free_.push_back(frame);
  ++evictions_;
}

uint64_t EvictingStore::evictions() const {
  const absl::MutexLock lock(&mu_);
  return evictions_;
}

}  // namespace optstate::storage
