#include "storage/io/simulated_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "storage/io/request_rules.h"

namespace optstate::io {

SimulatedImage::SimulatedImage(uint64_t bytes) : bytes_(0) { Resize(bytes); }

void SimulatedImage::Resize(uint64_t bytes) {
  bytes_ = bytes;
  blocks_.resize((bytes + kBlockBytes - 1) / kBlockBytes);
}

void SimulatedImage::Read(uint64_t offset, absl::Span<std::byte> data) const {
  CheckOrDie(offset <= bytes_ && data.size() <= bytes_ - offset,
             "a simulated read goes past the end");
  while (!data.empty()) {
    const uint64_t within = offset % kBlockBytes;
    const size_t size = std::min<uint64_t>(kBlockBytes - within, data.size());
    const Block* const block = blocks_[offset / kBlockBytes].get();
    if (block == nullptr) {
      std::memset(data.data(), 0, size);
    } else {
      std::memcpy(data.data(), block->data() + within, size);
    }
    data.remove_prefix(size);
    offset += size;
  }
}

void SimulatedImage::Write(uint64_t offset, absl::Span<const std::byte> data) {
  CheckOrDie(offset <= bytes_ && data.size() <= bytes_ - offset,
             "a simulated write goes past the end");
  while (!data.empty()) {
    const uint64_t within = offset % kBlockBytes;
    const size_t size = std::min<uint64_t>(kBlockBytes - within, data.size());
    std::shared_ptr<Block>& block = blocks_[offset / kBlockBytes];
    if (block == nullptr) {
      block = std::make_shared<Block>();
    } else if (block.use_count() > 1) {
      block = std::make_shared<Block>(*block);
    }
    std::memcpy(block->data() + within, data.data(), size);
    data.remove_prefix(size);
    offset += size;
  }
}

absl::Span<const std::byte> SimulatedFile::SectorOf(const LoggedWrite& write,
                                                    uint64_t sector) {
  return absl::MakeConstSpan(*write.data)
      .subspan(sector * kSimulatedSectorBytes - write.offset,
               kSimulatedSectorBytes);
}

void SimulatedFile::BeginWrite(uint64_t number, uint64_t offset,
                               absl::Span<const std::byte> data) {
  CheckOrDie(offset % kSimulatedSectorBytes == 0 &&
                 data.size() % kSimulatedSectorBytes == 0,
             "a simulated write is not made of sectors");
  LoggedWrite write;
  write.number = number;
  write.offset = offset;
  write.data =
      std::make_shared<std::vector<std::byte>>(data.begin(), data.end());
  write.possible.assign(data.size() / kSimulatedSectorBytes, true);
  log_.push_back(std::move(write));
}

void SimulatedFile::EndWrite(uint64_t number,
                             absl::FunctionRef<bool(uint64_t)> keep) {
  const auto write = std::find_if(
      log_.begin(), log_.end(),
      [&](const LoggedWrite& other) { return other.number == number; });
  CheckOrDie(write != log_.end() && write->ended == 0,
             "a simulated write ends that has not begun");
  write->ended = ++ended_;
  const uint64_t first = write->offset / kSimulatedSectorBytes;
  for (uint64_t i = 0; i < write->possible.size(); ++i) {
    write->possible[i] = keep(i);
    if (!write->possible[i]) continue;
    current_.Write(write->offset + i * kSimulatedSectorBytes,
                   SectorOf(*write, first + i));
  }
}

void SimulatedFile::ForgetOlder(uint64_t sector, uint64_t number) {
  for (LoggedWrite& write : log_) {
    if (write.number >= number) return;
    const uint64_t first = write.offset / kSimulatedSectorBytes;
    if (sector >= first && sector - first < write.possible.size()) {
      write.possible[sector - first] = false;
    }
  }
}

void SimulatedFile::Sync(uint64_t mark) {
  for (const LoggedWrite& write : log_) {
    if (!IsCovered(write, mark)) continue;
    const uint64_t first = write.offset / kSimulatedSectorBytes;
    for (uint64_t i = 0; i < write.possible.size(); ++i) {
      if (!write.possible[i]) continue;
      durable_.Write(write.offset + i * kSimulatedSectorBytes,
                     SectorOf(write, first + i));
      ForgetOlder(first + i, write.number);
    }
  }
  const auto end = std::remove_if(
      log_.begin(), log_.end(),
      [&](const LoggedWrite& write) { return IsCovered(write, mark); });
  log_.erase(end, log_.end());
}

void SimulatedFile::FailSync(uint64_t mark) {
  for (LoggedWrite& write : log_) {
    if (IsCovered(write, mark)) write.lost = true;
  }
}

void SimulatedFile::Flip(uint64_t offset, std::byte mask) {
  for (SimulatedImage* const image : {&current_, &durable_}) {
    std::byte value;
    image->Read(offset, absl::MakeSpan(&value, 1));
    value ^= mask;
    image->Write(offset, absl::MakeConstSpan(&value, 1));
  }
  for (LoggedWrite& write : log_) {
    if (offset < write.offset || offset - write.offset >= write.data->size()) {
      continue;
    }
    write.data = std::make_shared<std::vector<std::byte>>(*write.data);
    (*write.data)[offset - write.offset] ^= mask;
  }
}

void SimulatedFile::Truncate(uint64_t bytes) {
  CheckOrDie(
      log_.empty() && bytes <= current_.bytes(),
      "a simulated file is cut that has unsynced writes, or made longer");
  current_.Resize(bytes);
  durable_.Resize(bytes);
}

std::map<uint64_t, std::vector<uint64_t>> SimulatedFile::UnsyncedSectors()
    const {
  std::map<uint64_t, std::vector<uint64_t>> sectors;
  for (const LoggedWrite& write : log_) {
    const uint64_t first = write.offset / kSimulatedSectorBytes;
    for (uint64_t i = 0; i < write.possible.size(); ++i) {
      if (write.possible[i]) sectors[first + i].push_back(write.number);
    }
  }
  return sectors;
}

SimulatedFile SimulatedFile::AfterCrash(
    absl::FunctionRef<int(uint64_t, absl::Span<const uint64_t>)> choose) const {
  SimulatedFile file(0);
  file.durable_ = durable_;
  for (const auto& entry : UnsyncedSectors()) {
    const uint64_t sector = entry.first;
    const std::vector<uint64_t>& writes = entry.second;
    const int chosen = choose(sector, writes);
    CheckOrDie(chosen >= 0 && static_cast<size_t>(chosen) <= writes.size(),
               "a crash state is chosen that there is not");
    if (chosen == 0) continue;
    const uint64_t number = writes[static_cast<size_t>(chosen) - 1];
    const auto write = std::find_if(
        log_.begin(), log_.end(),
        [&](const LoggedWrite& other) { return other.number == number; });
    file.durable_.Write(sector * kSimulatedSectorBytes,
                        SectorOf(*write, sector));
  }
  file.current_ = file.durable_;
  return file;
}

SimulatedFile SimulatedFile::AfterKill(absl::FunctionRef<bool()> keep) const {
  SimulatedFile file = *this;
  for (const LoggedWrite& write : log_) {
    if (write.ended != 0) continue;
    file.EndWrite(write.number, [&](uint64_t) { return keep(); });
  }
  return file;
}

}  // namespace optstate::io
