#include "storage/tiers/nvme/durable_log.h"

#include <sys/stat.h>

#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "storage/format/checksum.h"

namespace optstate {
namespace {

constexpr uint64_t kMagic = 0x31524c4255524f53;  // "SORUBLR1"
constexpr uint32_t kVersion = 1;
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
  uint32_t header_crc32c;  // of the bytes before it
};
static_assert(sizeof(Header) == 88);
static_assert(std::endian::native == std::endian::little);

uint64_t BodyBytes(uint64_t records, uint64_t checksums, uint64_t job_bytes) {
  return records + checksums * sizeof(uint32_t) + job_bytes;
}

std::string PathIn(const std::string& directory) {
  return absl::StrCat(directory, "/commits");
}

// Runs one request to its end.
absl::Status Run(io::IoEngine* engine, io::IoRequest* request) {
  engine->Submit(request);
  io::IoRequest* done = nullptr;
  while (engine->Poll({&done, 1}, /*wait=*/true) == 0) {
  }
  return done->status;
}

}  // namespace

uint64_t DurableLog::RegionBytes(uint64_t records, uint64_t checksums,
                                 uint64_t job_bytes) {
  const uint64_t bytes =
      sizeof(Header) + BodyBytes(records, checksums, job_bytes);
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
  std::unique_ptr<DurableLog> log(new DurableLog(engine, PathIn(directory)));
  OPTSTATE_RETURN_IF_ERROR(log->Allocate(region_bytes));
  OPTSTATE_ASSIGN_OR_RETURN(log->file_,
                            engine->Open(log->path_, 2 * region_bytes,
                                         io::IoEngine::OpenMode::kCreate));
  return log;
}

absl::StatusOr<std::unique_ptr<DurableLog>> DurableLog::Open(
    io::IoEngine* engine, const std::string& directory) {
  std::unique_ptr<DurableLog> log(new DurableLog(engine, PathIn(directory)));
  struct stat file_stat;
  if (::stat(log->path_.c_str(), &file_stat) != 0) {
    return OsError(errno, absl::StrCat("stat ", log->path_));
  }
  const auto file_bytes = static_cast<uint64_t>(file_stat.st_size);
  const uint64_t region_bytes = file_bytes / 2;
  if (region_bytes == 0 || file_bytes % (2 * io::kSectorBytes) != 0) {
    return absl::DataLossError(absl::StrCat(
        log->path_, " has ", file_bytes,
        " bytes, which are no two regions of whole sectors: it was cut short, "
        "or is no file of optstate"));
  }
  OPTSTATE_RETURN_IF_ERROR(log->Allocate(region_bytes));
  OPTSTATE_ASSIGN_OR_RETURN(
      log->file_,
      engine->Open(log->path_, file_bytes, io::IoEngine::OpenMode::kOpen));
  for (uint32_t region = 0; region < 2; ++region) {
    absl::StatusOr<DurableCommit> commit = log->ReadRegion(region);
    if (absl::IsFailedPrecondition(commit.status())) return commit.status();
    if (!commit.ok()) {
      log->damage_.Update(commit.status());
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

absl::StatusOr<DurableCommit> DurableLog::ReadRegion(uint32_t region) {
  request_ = {};
  request_.kind = io::IoRequest::Kind::kRead;
  request_.file = file_;
  request_.offset_bytes = region * region_bytes_;
  request_.buffer = {buffer_.get(), region_bytes_};
  OPTSTATE_RETURN_IF_ERROR(Run(engine_, &request_));
  const auto damaged = [&](absl::string_view what) {
    return absl::DataLossError(
        absl::StrCat(path_, ", region ", region, ": ", what));
  };
  Header header;
  std::memcpy(&header, buffer_.get(), sizeof(header));
  if (header.magic == 0) return DurableCommit();  // not written yet
  if (header.magic != kMagic) return damaged("no commit");
  if (header.version != kVersion || header.byte_order != kByteOrder) {
    return absl::FailedPreconditionError(absl::StrCat(
        path_, ": version ", header.version, ", byte order ",
        absl::Hex(header.byte_order), "; this optstated reads version ",
        kVersion, ", byte order ", absl::Hex(kByteOrder),
        ". The files are left as they are: start the build that wrote them, or "
        "remove the directory to begin the job anew"));
  }
  if (header.header_crc32c !=
      Crc32c(&header, offsetof(Header, header_crc32c))) {
    return damaged("checksum of the header");
  }
  // Each is checked by itself first, so that their sum cannot wrap.
  const uint64_t room = region_bytes_ - sizeof(Header);
  if (header.region_bytes != region_bytes_ || header.records > room ||
      header.checksums > room / sizeof(uint32_t) || header.job_bytes > room ||
      BodyBytes(header.records, header.checksums, header.job_bytes) > room) {
    return damaged("sizes");
  }
  const std::byte* next = buffer_.get() + sizeof(Header);
  if (header.body_crc32c !=
      Crc32c(next,
             BodyBytes(header.records, header.checksums, header.job_bytes))) {
    return damaged("checksum of the body");
  }
  DurableCommit commit;
  commit.generation = header.generation;
  commit.step = header.step;
  commit.incarnation = header.incarnation;
  commit.slots = header.slots;
  commit.paths = header.paths;
  commit.places.resize(header.records);
  std::memcpy(commit.places.data(), next, header.records);
  next += header.records;
  commit.checksums.resize(header.checksums);
  std::memcpy(commit.checksums.data(), next,
              header.checksums * sizeof(uint32_t));
  next += header.checksums * sizeof(uint32_t);
  commit.job.assign(reinterpret_cast<const char*>(next), header.job_bytes);
  return commit;
}

absl::StatusOr<io::IoRequest*> DurableLog::Prepare(
    const DurableCommit& commit) {
  const uint64_t bytes = RegionBytes(
      commit.places.size(), commit.checksums.size(), commit.job.size());
  if (bytes > region_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path_, ": a commit of ", bytes,
                     " bytes does not fit a region of ", region_bytes_));
  }
  std::byte* next = buffer_.get() + sizeof(Header);
  const auto put = [&](const void* from, uint64_t size) {
    std::memcpy(next, from, size);
    next += size;
  };
  put(commit.places.data(), commit.places.size());
  put(commit.checksums.data(), commit.checksums.size() * sizeof(uint32_t));
  put(commit.job.data(), commit.job.size());
  Header header = {};
  header.magic = kMagic;
  header.version = kVersion;
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
  header.body_crc32c = Crc32c(body, static_cast<uint64_t>(next - body));
  header.header_crc32c = Crc32c(&header, offsetof(Header, header_crc32c));
  std::memcpy(buffer_.get(), &header, sizeof(header));
  std::memset(next, 0, bytes - static_cast<uint64_t>(next - buffer_.get()));
  request_ = {};
  request_.kind = io::IoRequest::Kind::kWrite;
  request_.priority = io::IoPriority::kSwapOut;
  request_.file = file_;
  request_.offset_bytes = commit.generation % 2 * region_bytes_;
  request_.buffer = {buffer_.get(), bytes};
  return &request_;
}

}  // namespace optstate
