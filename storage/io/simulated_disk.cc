#include "storage/io/simulated_disk.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/io/file_error.h"
#include "storage/io/request_rules.h"

namespace optstate::io {
namespace {

std::string FolderOf(const std::string& path) {
  return path.substr(0, path.rfind('/'));
}

bool IsRepeated(int64_t result) {
  return result == -EINTR || result == -EAGAIN;
}

bool Matches(const SimulatedFault& fault, IoRequest::Kind kind,
             const std::string& path, uint64_t offset, uint64_t bytes) {
  if (fault.kind.has_value() && *fault.kind != kind) return false;
  if (!fault.path.empty() && fault.path != path) return false;
  return kind == IoRequest::Kind::kSync ||
         (offset < fault.end && offset + bytes > fault.begin);
}

// The ways in which CrashAtRandom() chooses.
enum class CrashStyle : uint8_t {
  kOld,
  kNew,
  kWholeWrites,
  kPrefix,
  kSectors,
};
constexpr uint64_t kCrashStyles = 5;

}  // namespace

SimulatedDisk::SimulatedDisk(SimulatedDiskOptions options)
    : options_(std::move(options)), random_(options_.seed) {
  CheckOrDie(options_.latency_us_min <= options_.latency_us_max,
             "a simulated latency's range is empty");
}

uint64_t SimulatedDisk::Draw(uint64_t min, uint64_t max) {
  return min + random_() % (max - min + 1);
}

void SimulatedDisk::AddFault(SimulatedFault fault) {
  faults_.push_back(std::move(fault));
}

std::shared_ptr<SimulatedDisk::File> SimulatedDisk::Find(
    const std::string& path) const {
  const auto found = files_.find(path);
  CheckOrDie(found != files_.end(), "a simulated file does not exist");
  return found->second;
}

void SimulatedDisk::Flip(const std::string& path, uint64_t offset,
                         std::byte mask) {
  Find(path)->content.Flip(offset, mask);
}

void SimulatedDisk::Truncate(const std::string& path, uint64_t bytes) {
  Find(path)->content.Truncate(bytes);
}

void SimulatedDisk::LoseFile(const std::string& path) {
  Find(path);
  files_.erase(path);
}

std::vector<std::byte> SimulatedDisk::Read(const std::string& path,
                                           uint64_t offset,
                                           uint64_t bytes) const {
  std::vector<std::byte> data(bytes);
  Find(path)->content.Read(offset, absl::MakeSpan(data));
  return data;
}

uint64_t SimulatedDisk::UsedBytes() const {
  uint64_t used = 0;
  for (const auto& [path, file] : files_) used += file->content.bytes();
  return used;
}

void SimulatedDisk::Notify(SimulatedEvent::Kind kind, const std::string& path,
                           uint64_t offset, uint64_t bytes,
                           int64_t result) const {
  if (!hook_) return;
  hook_({.kind = kind,
         .path = path,
         .offset = offset,
         .bytes = bytes,
         .result = result});
}

absl::StatusOr<std::shared_ptr<SimulatedDisk::File>> SimulatedDisk::Open(
    const std::string& path, uint64_t bytes, IoEngine::OpenMode mode) {
  if (gone_) return IoError(ENODEV, absl::StrCat("open ", path), path);
  const auto found = files_.find(path);
  if (mode == IoEngine::OpenMode::kCreate) {
    if (options_.folders.count(FolderOf(path)) == 0) {
      return IoError(ENOENT, absl::StrCat("open ", path), path);
    }
    if (found != files_.end()) {
      return IoError(EEXIST, absl::StrCat("open ", path), path);
    }
    const uint64_t left = options_.capacity_bytes - UsedBytes();
    if (left < bytes) {
      FileSurroundings around;
      around.path = path;
      around.bytes_needed = bytes;
      around.bytes_left = left;
      return absl::ResourceExhaustedError(absl::StrCat(
          path, " needs ", bytes, " bytes", FileAdvice(ENOSPC, around)));
    }
    auto file = std::make_shared<File>(bytes);
    file->locked.push_back({0, bytes});
    files_[path] = file;
    Notify(SimulatedEvent::Kind::kCreated, path, 0, bytes, 0);
    return file;
  }
  if (found == files_.end()) {
    return IoError(ENOENT, absl::StrCat("open ", path), path);
  }
  const std::shared_ptr<File>& file = found->second;
  if (!file->locked.empty()) {
    return absl::UnavailableError(
        absl::StrCat(path, " is locked by another engine"));
  }
  if (file->content.bytes() < bytes) {
    return absl::DataLossError(absl::StrCat(
        path, " has ", file->content.bytes(), " bytes, expected ", bytes));
  }
  file->locked.push_back({0, file->content.bytes()});
  return file;
}

absl::StatusOr<std::shared_ptr<SimulatedDisk::File>> SimulatedDisk::OpenExtent(
    const std::string& device, const Extent& extent) {
  if (gone_) return IoError(ENODEV, absl::StrCat("open ", device), device);
  const auto found = files_.find(device);
  if (found == files_.end()) {
    return IoError(ENOENT, absl::StrCat("open ", device), device);
  }
  const std::shared_ptr<File>& file = found->second;
  if (file->content.bytes() < extent.end_bytes()) {
    return absl::DataLossError(
        absl::StrCat(device, " has ", file->content.bytes(),
                     " bytes, and an extent to ", extent.end_bytes()));
  }
  for (const Extent& other : file->locked) {
    if (other.begin_bytes < extent.end_bytes() &&
        extent.begin_bytes < other.end_bytes()) {
      return absl::UnavailableError(
          absl::StrCat(device, " is locked by another engine"));
    }
  }
  file->locked.push_back(extent);
  return file;
}

absl::Status SimulatedDisk::Remove(const std::string& path) {
  if (gone_) return IoError(ENODEV, absl::StrCat("unlink of ", path), path);
  if (files_.erase(path) == 0) {
    return IoError(ENOENT, absl::StrCat("unlink of ", path), path);
  }
  Notify(SimulatedEvent::Kind::kRemoved, path, 0, 0, 0);
  return absl::OkStatus();
}

absl::Status SimulatedDisk::Rename(const std::string& from,
                                   const std::string& to) {
  const std::string what = absl::StrCat("rename of ", from, " to ", to);
  if (gone_) return IoError(ENODEV, what, from);
  const auto found = files_.find(from);
  if (found == files_.end()) return IoError(ENOENT, what, from);
  const std::shared_ptr<File> file = found->second;
  files_.erase(found);
  files_[to] = file;
  Notify(SimulatedEvent::Kind::kRenamed, to, 0, 0, 0);
  return absl::OkStatus();
}

std::optional<SimulatedFault> SimulatedDisk::FaultOf(const Call& call) {
  std::optional<SimulatedFault> result;
  for (SimulatedFault& fault : faults_) {
    if (!Matches(fault, call.kind, call.path, call.offset, call.data.size())) {
      continue;
    }
    if (fault.skip > 0) {
      --fault.skip;
    } else if (fault.times > 0 && !result.has_value()) {
      if (fault.times != SimulatedFault::kForever) --fault.times;
      result = fault;
    }
  }
  return result;
}

void SimulatedDisk::ApplyFault(const SimulatedFault& fault, Call* call) {
  const bool moves_bytes = call->kind != IoRequest::Kind::kSync;
  switch (fault.effect) {
    case SimulatedFault::Effect::kError:
      call->result = -fault.error_number;
      break;
    case SimulatedFault::Effect::kShort:
      if (moves_bytes && call->result > 0) {
        call->result =
            std::min(call->result, static_cast<int64_t>(fault.bytes));
      }
      break;
    case SimulatedFault::Effect::kMisdirect:
      if (call->kind == IoRequest::Kind::kWrite) {
        call->offset = std::min(
            fault.bytes, call->file->content.bytes() - call->data.size());
      }
      break;
    case SimulatedFault::Effect::kLostSync:
      call->lose_sync = true;
      break;
  }
}

void SimulatedDisk::DisturbAtRandom(Call* call) {
  const uint64_t sectors =
      static_cast<uint64_t>(call->result) / kSimulatedSectorBytes;
  if (options_.short_one_in > 0 && sectors > 1 &&
      Draw(1, options_.short_one_in) == 1) {
    call->result =
        static_cast<int64_t>(Draw(1, sectors - 1) * kSimulatedSectorBytes);
  }
  // An interrupted sync is an error.
  if (options_.interrupted_one_in > 0 && call->kind != IoRequest::Kind::kSync &&
      Draw(1, options_.interrupted_one_in) == 1) {
    call->result = Draw(0, 1) == 0 ? -EINTR : -EAGAIN;
  }
}

SimulatedDisk::Call SimulatedDisk::BeginCall(Call call) {
  call.number = ++calls_;
  call.due_us =
      now_us_ + Draw(options_.latency_us_min, options_.latency_us_max);
  const uint64_t size = call.file->content.bytes();
  call.result = static_cast<int64_t>(
      std::min<uint64_t>(call.data.size(), size - std::min(call.offset, size)));
  if (const std::optional<SimulatedFault> fault = FaultOf(call)) {
    ApplyFault(*fault, &call);
  } else {
    DisturbAtRandom(&call);
  }
  switch (call.kind) {
    case IoRequest::Kind::kRead:
      break;
    case IoRequest::Kind::kWrite: {
      // An interrupted call has not begun; one that fails later may have
      // written anything.
      const uint64_t written = IsRepeated(call.result) ? 0
                               : call.result < 0
                                   ? call.data.size()
                                   : static_cast<uint64_t>(call.result);
      call.data = call.data.first(written);
      call.file->content.BeginWrite(call.number, call.offset, call.data);
      Notify(SimulatedEvent::Kind::kWriteBegun, call.path, call.offset, written,
             0);
      break;
    }
    case IoRequest::Kind::kSync:
      Notify(SimulatedEvent::Kind::kSyncBegun, call.path, 0, 0, 0);
      break;
  }
  return call;
}

void SimulatedDisk::EndWrite(const Call& call) {
  const bool failed = call.result < 0;
  call.file->content.EndWrite(
      call.number, [&](uint64_t) { return !failed || Draw(0, 1) == 1; });
}

void SimulatedDisk::EndSync(const Call& call) {
  if (call.result == 0) {
    if (!call.lose_sync) call.file->content.Sync(call.sync_mark);
  } else if (!IsRepeated(call.result)) {
    call.file->content.FailSync(call.sync_mark);
  }
}

int64_t SimulatedDisk::EndCall(const Call& begun) {
  Call call = begun;
  if (gone_) call.result = -ENODEV;
  switch (call.kind) {
    case IoRequest::Kind::kRead:
      if (call.result > 0) {
        call.file->content.Read(
            call.offset, call.data.first(static_cast<size_t>(call.result)));
      }
      break;
    case IoRequest::Kind::kWrite:
      EndWrite(call);
      Notify(SimulatedEvent::Kind::kWriteEnded, call.path, call.offset,
             call.data.size(), call.result);
      break;
    case IoRequest::Kind::kSync:
      EndSync(call);
      Notify(SimulatedEvent::Kind::kSyncEnded, call.path, 0, 0, call.result);
      break;
  }
  return call.result;
}

std::unique_ptr<SimulatedDisk> SimulatedDisk::Successor(uint64_t seed) const {
  SimulatedDiskOptions options = options_;
  options.seed = seed;
  auto disk = std::make_unique<SimulatedDisk>(std::move(options));
  disk->calls_ = calls_;
  disk->now_us_ = now_us_;
  return disk;
}

std::unique_ptr<SimulatedDisk> SimulatedDisk::Crash(CrashChoice choose) const {
  auto disk = Successor(options_.seed + calls_ + 1);
  for (const auto& entry : files_) {
    const std::string& path = entry.first;
    disk->files_[path] =
        std::make_shared<File>(entry.second->content.AfterCrash(
            [&](uint64_t sector, absl::Span<const uint64_t> writes) {
              return choose({path, sector, writes});
            }));
  }
  return disk;
}

std::unique_ptr<SimulatedDisk> SimulatedDisk::CrashAtRandom(
    uint64_t seed) const {
  std::mt19937_64 random(seed);
  const auto style = static_cast<CrashStyle>(random() % kCrashStyles);
  const uint64_t last = calls_ - random() % (calls_ + 1);
  std::map<uint64_t, bool> kept;  // by the number of a write
  return Crash([&](const CrashSector& sector) {
    const int newest = static_cast<int>(sector.writes.size());
    switch (style) {
      case CrashStyle::kOld:
        return 0;
      case CrashStyle::kNew:
        return newest;
      case CrashStyle::kWholeWrites:
        for (int i = newest; i > 0; --i) {
          const auto [entry, is_new] = kept.try_emplace(sector.writes[i - 1]);
          if (is_new) entry->second = random() % 2 == 0;
          if (entry->second) return i;
        }
        return 0;
      case CrashStyle::kPrefix: {
        int version = newest;
        while (version > 0 && sector.writes[version - 1] > last) --version;
        const bool torn = version > 0 && sector.writes[version - 1] == last;
        return torn && random() % 2 == 0 ? version - 1 : version;
      }
      case CrashStyle::kSectors:
        break;
    }
    return static_cast<int>(random() % (sector.writes.size() + 1));
  });
}

bool SimulatedDisk::ForEachCrash(
    uint64_t limit,
    absl::FunctionRef<void(std::unique_ptr<SimulatedDisk>)> visit) const {
  // Counts up, with a digit for each sector.
  std::vector<int> digits;
  std::vector<int> largest;
  for (uint64_t visited = 0; visited < limit; ++visited) {
    size_t place = 0;
    visit(Crash([&](const CrashSector& sector) {
      if (place == digits.size()) {
        digits.push_back(0);
        largest.push_back(static_cast<int>(sector.writes.size()));
      }
      return digits[place++];
    }));
    place = 0;
    while (place < digits.size() && digits[place] == largest[place]) {
      digits[place++] = 0;
    }
    if (place == digits.size()) return true;
    ++digits[place];
  }
  return false;
}

std::unique_ptr<SimulatedDisk> SimulatedDisk::AfterKill(uint64_t seed) const {
  auto disk = Successor(seed);
  for (const auto& [path, file] : files_) {
    disk->files_[path] = std::make_shared<File>(
        file->content.AfterKill([&disk] { return disk->Draw(0, 1) == 1; }));
  }
  return disk;
}

}  // namespace optstate::io
