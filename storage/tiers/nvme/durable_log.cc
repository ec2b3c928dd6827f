#include "storage/tiers/nvme/durable_log.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "storage/format/checksum.h"
#include "storage/format/sealed_header.h"

namespace optstate::nvme {
namespace {

constexpr uint64_t kMagic = 0x31524c4255524f53;  // "SORUBLR1"
constexpr uint32_t kVersion = 1;
// The version of a region whose commit has weights; others stay of the first.
constexpr uint32_t kVersionWithWeights = 2;
constexpr uint32_t kByteOrder = 0x01020304;

struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t byte_order;
  uint64_t generation;
  uint64_t step;
  uint64_t incarnation;
  uint64_t region_bytes;
  uint32_t slots;
  uint32_t paths;
  uint64_t records;
  uint64_t checksums;
  uint64_t job_bytes;
  uint32_t body_crc32c;
  uint32_t header_crc32c;  // see sealed_header.h
};
static_assert(sizeof(Header) == 88);
static_assert(offsetof(Header, generation) == 16);
static_assert(offsetof(Header, region_bytes) == 40);
static_assert(offsetof(Header, slots) == 48);
static_assert(offsetof(Header, records) == 56);
static_assert(offsetof(Header, job_bytes) == 72);
static_assert(offsetof(Header, body_crc32c) == 80);
static_assert(offsetof(Header, header_crc32c) == 84);
static_assert(std::endian::native == std::endian::little);

// The first sector of the file.
struct Superblock {
  uint64_t magic;
  uint32_t version;
  uint32_t byte_order;
  uint64_t region_bytes;
  uint32_t reserved;
  uint32_t header_crc32c;  // see sealed_header.h
};
static_assert(sizeof(Superblock) == 32);
static_assert(offsetof(Superblock, region_bytes) == 16);
static_assert(offsetof(Superblock, header_crc32c) == 28);
constexpr uint64_t kSuperblockMagic = 0x3153544d434f4f53;  // "SOOCMTS1"

absl::Status CheckVersion(const std::string& path, uint32_t version,
                          uint32_t byte_order, uint32_t version_max) {
  if (version >= kVersion && version <= version_max &&
      byte_order == kByteOrder) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      path, ": version ", version, ", byte order ", absl::Hex(byte_order),
      "; this optstated reads version ", version_max, ", byte order ",
      absl::Hex(kByteOrder),
      ". The files are left as they are: start the build that wrote them, or "
      "remove the directory to begin the job anew"));
}

uint64_t BodyBytes(uint64_t records, uint64_t checksums, uint64_t job_bytes,
                   uint64_t weights) {
  return records + checksums * sizeof(uint32_t) + job_bytes +
         weights * sizeof(uint32_t);
}

std::string PathIn(const std::string& directory) {
  return absl::StrCat(directory, "/commits");
}

std::string NextPathIn(const std::string& directory, uint32_t arrangement) {
  return absl::StrCat(directory, "/commits.", arrangement);
}

// Says whether a sector has no byte but zeros.
bool IsZero(const std::byte* sector) {
  return std::all_of(sector, sector + io::kSectorBytes,
                     [](std::byte byte) { return byte == std::byte{0}; });
}

// Reads that fail are tried so often.
constexpr int kAttemptsMax = 3;

}  // namespace

uint64_t DurableLog::RegionBytes(uint64_t records, uint64_t checksums,
                                 uint64_t job_bytes, uint64_t weights) {
  const uint64_t bytes =
      sizeof(Header) + BodyBytes(records, checksums, job_bytes, weights);
  return (bytes + io::kSectorBytes - 1) / io::kSectorBytes * io::kSectorBytes;
}

DurableLog::DurableLog(io::IoEngine* engine, std::string path)
    : engine_(engine), path_(std::move(path)) {}

absl::Status DurableLog::Allocate(uint64_t region_bytes) {
  region_bytes_ = region_bytes;
  buffer_.reset(static_cast<std::byte*>(
      std::aligned_alloc(io::kSectorBytes, region_bytes)));
  if (buffer_ != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("no memory for a commit of ", region_bytes, " bytes"));
}

absl::StatusOr<std::unique_ptr<DurableLog>> DurableLog::Create(
    io::IoEngine* engine, const std::string& directory, uint64_t region_bytes) {
  return CreateAt(engine, PathIn(directory), region_bytes);
}

absl::StatusOr<std::unique_ptr<DurableLog>> DurableLog::CreateNext(
    io::IoEngine* engine, const std::string& directory, uint64_t region_bytes,
    uint32_t arrangement) {
  OPTSTATE_RETURN_IF_ERROR(RemoveNext(engine, directory, arrangement));
  return CreateAt(engine, NextPathIn(directory, arrangement), region_bytes);
}

absl::Status DurableLog::Adopt(io::IoEngine* engine,
                               const std::string& directory,
                               uint32_t arrangement) {
  if (arrangement == 0) return absl::OkStatus();
  absl::Status renamed =
      engine->Rename(NextPathIn(directory, arrangement), PathIn(directory));
  // An engine that has renamed the file may have died before that was durable.
  if (absl::IsNotFound(renamed)) {
    renamed = engine->Rename(PathIn(directory), PathIn(directory));
  }
  return absl::IsNotFound(renamed) ? absl::OkStatus() : renamed;
}

absl::Status DurableLog::RemoveNext(io::IoEngine* engine,
                                    const std::string& directory,
                                    uint32_t arrangement) {
  const absl::Status removed =
      engine->Remove(NextPathIn(directory, arrangement));
  return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
}

absl::StatusOr<std::unique_ptr<DurableLog>> DurableLog::CreateAt(
    io::IoEngine* engine, std::string path, uint64_t region_bytes) {
  std::unique_ptr<DurableLog> log(new DurableLog(engine, std::move(path)));
  OPTSTATE_RETURN_IF_ERROR(log->Allocate(region_bytes));
  OPTSTATE_ASSIGN_OR_RETURN(
      log->file_, engine->Open(log->path_, io::kSectorBytes + 2 * region_bytes,
                               io::IoEngine::OpenMode::kCreate));
  const absl::Status written = log->WriteSuperblock();
  if (!written.ok()) {
    engine->Close(log->file_);
    engine->Remove(log->path_).IgnoreError();
    return written;
  }
  return log;
}

absl::StatusOr<std::unique_ptr<DurableLog>> DurableLog::Open(
    io::IoEngine* engine, const std::string& directory) {
  std::unique_ptr<DurableLog> log(new DurableLog(engine, PathIn(directory)));
  OPTSTATE_ASSIGN_OR_RETURN(log->file_,
                            engine->Open(log->path_, io::kSectorBytes,
                                         io::IoEngine::OpenMode::kOpen));
  const absl::Status read = log->ReadSuperblock();
  if (!read.ok()) {
    engine->Close(log->file_);
    return read;
  }
  bool is_other_unwritten = false;
  for (uint32_t region = 0; region < 2; ++region) {
    const absl::Status is_read = log->Run(
        io::IoRequest::Kind::kRead, log->RegionAt(region), log->region_bytes_);
    if (!is_read.ok()) {
      engine->Close(log->file_);
      return is_read;
    }
    absl::StatusOr<storage::DurableCommit> commit = log->ParseRegion(region);
    if (!commit.ok()) {
      log->damage_.Update(commit.status());
      log->is_first_torn_ = region == 1 && is_other_unwritten;
    } else if (commit->generation == 0) {
      is_other_unwritten = true;
    } else if (commit->generation > log->last_.generation) {
      log->last_ = *std::move(commit);
    }
  }
  return log;
}

absl::Status DurableLog::Remove(io::IoEngine* engine,
                                const std::string& directory) {
  const absl::Status removed = engine->Remove(PathIn(directory));
  return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
}

absl::Status DurableLog::Run(io::IoRequest::Kind kind, uint64_t offset_bytes,
                             uint64_t bytes) {
  const bool is_read = kind == io::IoRequest::Kind::kRead;
  for (int attempt = 1;; ++attempt) {
    request_ = {};
    request_.kind = kind;
    request_.file = file_;
    request_.offset_bytes = offset_bytes;
    if (bytes > 0) request_.buffer = {buffer_.get(), bytes};
    engine_->Submit(&request_);
    io::IoRequest* done = nullptr;
    while (engine_->Poll({&done, 1}, /*wait=*/true) == 0) {
    }
    if (done->status.ok() || !is_read || attempt == kAttemptsMax) {
      return done->status;
    }
  }
}

absl::Status DurableLog::WriteSuperblock() {
  Superblock block = {};
  block.magic = kSuperblockMagic;
  block.version = kVersion;
  block.byte_order = kByteOrder;
  block.region_bytes = region_bytes_;
  storage::Seal(&block);
  std::memset(buffer_.get(), 0, io::kSectorBytes);
  std::memcpy(buffer_.get(), &block, sizeof(block));
  OPTSTATE_RETURN_IF_ERROR(
      Run(io::IoRequest::Kind::kWrite, 0, io::kSectorBytes));
  return Run(io::IoRequest::Kind::kSync, 0, 0);
}

absl::Status DurableLog::Settle() {
  if (last_.generation == 0) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(WriteLast());
  ++last_.generation;
  return WriteLast();
}

absl::Status DurableLog::Put(storage::DurableCommit commit) {
  last_ = std::move(commit);
  for (uint32_t i = 0; i < kCommitCopies; ++i) {
    ++last_.generation;
    OPTSTATE_RETURN_IF_ERROR(WriteLast());
  }
  return absl::OkStatus();
}

absl::Status DurableLog::WriteLast() {
  OPTSTATE_ASSIGN_OR_RETURN(const io::IoRequest* const request, Prepare(last_));
  OPTSTATE_RETURN_IF_ERROR(Run(io::IoRequest::Kind::kWrite,
                               request->offset_bytes, request->buffer.size()));
  return Run(io::IoRequest::Kind::kSync, 0, 0);
}

absl::Status DurableLog::ReadSuperblock() {
  OPTSTATE_RETURN_IF_ERROR(Allocate(io::kSectorBytes));
  OPTSTATE_RETURN_IF_ERROR(
      Run(io::IoRequest::Kind::kRead, 0, io::kSectorBytes));
  if (IsZero(buffer_.get())) {
    // The first sector is durable before anything behind it is written.
    OPTSTATE_RETURN_IF_ERROR(
        Run(io::IoRequest::Kind::kRead, io::kSectorBytes, io::kSectorBytes));
    if (IsZero(buffer_.get())) {
      return absl::NotFoundError(
          absl::StrCat(path_, " was not made to its end: it has no commit"));
    }
    return absl::DataLossError(
        absl::StrCat(path_, ": its first sector is damaged"));
  }
  Superblock block;
  std::memcpy(&block, buffer_.get(), sizeof(block));
  if (block.magic != kSuperblockMagic) {
    return absl::DataLossError(
        absl::StrCat(path_, " is no file of commits: it begins with ",
                     absl::Hex(block.magic, absl::kZeroPad16)));
  }
  OPTSTATE_RETURN_IF_ERROR(
      CheckVersion(path_, block.version, block.byte_order, kVersion));
  constexpr uint64_t kRegionBytesMax = uint64_t{1} << 40;
  if (!storage::IsSealed(block) || block.region_bytes == 0 ||
      block.region_bytes > kRegionBytesMax ||
      block.region_bytes % io::kSectorBytes != 0) {
    return absl::DataLossError(
        absl::StrCat(path_, ": its first sector is damaged"));
  }
  // The file's last sector is read before memory is taken for a region: the
  // file may be shorter than its first sector says.
  OPTSTATE_RETURN_IF_ERROR(Run(io::IoRequest::Kind::kRead,
                               2 * block.region_bytes, io::kSectorBytes));
  return Allocate(block.region_bytes);
}

absl::StatusOr<storage::DurableCommit> DurableLog::ParseRegion(
    uint32_t region) const {
  const auto damaged = [&](absl::string_view what) {
    return absl::DataLossError(
        absl::StrCat(path_, ", region ", region, ": ", what));
  };
  Header header;
  std::memcpy(&header, buffer_.get(), sizeof(header));
  if (header.magic == 0) return storage::DurableCommit();  // not written yet
  if (header.magic != kMagic) return damaged("no commit");
  OPTSTATE_RETURN_IF_ERROR(CheckVersion(
      path_, header.version, header.byte_order, kVersionWithWeights));
  if (!storage::IsSealed(header)) {
    return damaged("checksum of the header");
  }
  // Each is checked by itself first, so that their sum cannot wrap.
  const uint64_t room = region_bytes_ - sizeof(Header);
  const uint64_t weights =
      header.version == kVersionWithWeights ? header.paths : 0;
  const auto body_bytes = [&] {
    return BodyBytes(header.records, header.checksums, header.job_bytes,
                     weights);
  };
  if (header.region_bytes != region_bytes_ || header.records > room ||
      header.checksums > room / sizeof(uint32_t) || header.job_bytes > room ||
      body_bytes() > room) {
    return damaged("sizes");
  }
  const std::byte* next = buffer_.get() + sizeof(Header);
  if (header.body_crc32c != storage::Crc32c(next, body_bytes())) {
    return damaged("checksum of the body");
  }
  storage::DurableCommit commit;
  commit.generation = header.generation;
  commit.step = header.step;
  commit.incarnation = header.incarnation;
  commit.slots = header.slots;
  commit.paths = header.paths;
  // A vector without elements has no memory that memcpy() could be given.
  const auto take = [&next](void* to, uint64_t size) {
    if (size > 0) std::memcpy(to, next, size);
    next += size;
  };
  commit.places.resize(header.records);
  take(commit.places.data(), header.records);
  commit.checksums.resize(header.checksums);
  take(commit.checksums.data(), header.checksums * sizeof(uint32_t));
  commit.job.assign(reinterpret_cast<const char*>(next), header.job_bytes);
  next += header.job_bytes;
  commit.weights.resize(weights);
  take(commit.weights.data(), weights * sizeof(uint32_t));
  return commit;
}

absl::StatusOr<io::IoRequest*> DurableLog::Prepare(
    const storage::DurableCommit& commit) {
  const uint64_t bytes =
      RegionBytes(commit.places.size(), commit.checksums.size(),
                  commit.job.size(), commit.weights.size());
  if (bytes > region_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path_, ": a commit of ", bytes,
                     " bytes does not fit a region of ", region_bytes_));
  }
  std::byte* next = buffer_.get() + sizeof(Header);
  const auto put = [&](const void* from, uint64_t size) {
    if (size > 0) std::memcpy(next, from, size);
    next += size;
  };
  put(commit.places.data(), commit.places.size());
  put(commit.checksums.data(), commit.checksums.size() * sizeof(uint32_t));
  put(commit.job.data(), commit.job.size());
  put(commit.weights.data(), commit.weights.size() * sizeof(uint32_t));
  Header header = {};
  header.magic = kMagic;
  header.version = commit.weights.empty() ? kVersion : kVersionWithWeights;
  header.byte_order = kByteOrder;
  header.generation = commit.generation;
  header.step = commit.step;
  header.incarnation = commit.incarnation;
  header.region_bytes = region_bytes_;
  header.slots = commit.slots;
  header.paths = commit.paths;
  header.records = commit.places.size();
  header.checksums = commit.checksums.size();
  header.job_bytes = commit.job.size();
  const std::byte* const body = buffer_.get() + sizeof(Header);
  header.body_crc32c =
      storage::Crc32c(body, static_cast<uint64_t>(next - body));
  storage::Seal(&header);
  std::memcpy(buffer_.get(), &header, sizeof(header));
  std::memset(next, 0, bytes - static_cast<uint64_t>(next - buffer_.get()));
  request_ = {};
  request_.kind = io::IoRequest::Kind::kWrite;
  request_.priority = io::IoPriority::kSwapOut;
  request_.file = file_;
  request_.offset_bytes = RegionAt(commit.generation);
  request_.buffer = {buffer_.get(), bytes};
  return &request_;
}

}  // namespace optstate::nvme
