// The file `commits` of a job on a disk: its last durable steps. Input: a byte
// of flags (1: checksums are made right), then three parts, each with its
// length in two bytes: the first sector, and the two regions.

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/session/durability/durable_job.h"
#include "server/session/job_description.h"
#include "storage/durable_commit.h"
#include "storage/format/checksum.h"
#include "storage/io/blocking_io_engine.h"
#include "storage/io/io_engine.h"
#include "storage/io/io_engine_options.h"
#include "storage/tiers/nvme/durable_log.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/scratch_folder.h"

namespace optstate::fuzz {
namespace {

constexpr uint8_t kRightChecksums = 1;
// Sizes of the first sector, and of a region's header.
constexpr size_t kSuperblockBytes = 32;
constexpr size_t kHeaderBytes = 88;
constexpr uint64_t kRegionBytes = 2 * io::kSectorBytes;

void PutChecksum(size_t at, const char* data, size_t bytes, std::string* part) {
  const uint32_t crc = storage::Crc32c(data, bytes);
  std::memcpy(part->data() + at, &crc, sizeof(crc));
}

std::string Sector(absl::string_view bytes, bool right_checksums) {
  std::string sector(bytes.substr(0, io::kSectorBytes));
  sector.resize(io::kSectorBytes);
  if (right_checksums) {
    PutChecksum(kSuperblockBytes - 4, sector.data(), kSuperblockBytes - 4,
                &sector);
  }
  return sector;
}

// Returns the bytes that a region's header gives to its body.
uint64_t BodyBytes(const std::string& region) {
  uint32_t version = 0, paths = 0;
  uint64_t sizes[3];  // records, checksums, bytes about the job
  std::memcpy(&version, region.data() + 8, sizeof(version));
  std::memcpy(&paths, region.data() + 52, sizeof(paths));
  std::memcpy(sizes, region.data() + 56, sizeof(sizes));
  return sizes[0] + 4 * sizes[1] + sizes[2] + (version == 2 ? 4 * paths : 0);
}

std::string Region(absl::string_view bytes, bool right_checksums) {
  std::string region(bytes.substr(0, kRegionBytes));
  region.resize(kRegionBytes);
  if (!right_checksums) return region;
  const uint64_t body = BodyBytes(region);
  if (body <= region.size() - kHeaderBytes) {
    PutChecksum(80, region.data() + kHeaderBytes, body, &region);
  }
  PutChecksum(84, region.data(), 84, &region);
  return region;
}

void Open(io::IoEngine* engine, const std::string& folder) {
  const auto log = nvme::DurableLog::Open(engine, folder);
  Require(!absl::IsResourceExhausted(log.status()),
          "memory is taken for what a file has, not for what it says");
  if (!log.ok()) return;
  const storage::DurableCommit& commit = (*log)->last();
  const auto job = session::ParseDurableJob(commit.job);
  if (job.ok()) (void)session::ParseDescription(job->description);
  if (commit.generation != 0 && commit.generation < UINT64_MAX - 1) {
    const std::string before = commit.job;
    Require((*log)->Settle().ok() && (*log)->last().job == before,
            "a commit that was read can be written again");
  }
  engine->Close((*log)->file());
}

std::string Input(uint8_t flags, const std::string& file) {
  return FuzzBytes(flags) + FuzzString(file.substr(0, kSuperblockBytes)) +
         FuzzString(file.substr(io::kSectorBytes, 1024)) +
         FuzzString(file.substr(io::kSectorBytes + kRegionBytes, 1024));
}

io::IoEngine* Engine() {
  static io::IoEngine* const engine = [] {
    io::IoEngineOptions options;
    options.threads = 1;
    return io::MakeBlockingIoEngine(options).release();
  }();
  return engine;
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const bool has_weights : {false, true}) {
    const ScratchFolder folder;
    auto log = nvme::DurableLog::Create(Engine(), folder.path(), kRegionBytes);
    Require(log.ok(), "a log can be made");
    storage::DurableCommit commit;
    commit.step = 7;
    commit.incarnation = 11;
    commit.paths = 2;
    if (has_weights) commit.weights = {1, 3};
    commit.places = {2, 3, 2};
    commit.checksums = {1, 2, 3, 4, 5};
    commit.job = session::SerializeDurableJob(session::DurableJob());
    Require((*log)->Put(commit).ok(), "a commit can be written");
    Engine()->Close((*log)->file());
    std::string file;
    {
      std::ifstream stream(folder.path() + "/commits", std::ios::binary);
      file.assign(std::istreambuf_iterator<char>(stream), {});
    }
    seeds.push_back(Input(0, file));
    seeds.push_back(Input(kRightChecksums, file));
    // Regions of 512 GiB.
    file[16 + 1] = '\0';
    file[16 + 4] = '\x80';
    seeds.push_back(Input(kRightChecksums, file));
  }
  return seeds;
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate::fuzz;
  static const ScratchFolder* const folder = new ScratchFolder();
  FuzzInput input(data, size);
  const bool right = (input.Take<uint8_t>() & kRightChecksums) != 0;
  std::string file = Sector(input.TakeString(), right);
  file += Region(input.TakeString(), right);
  file += Region(input.TakeString(), right);
  folder->Write("commits", file);
  Open(Engine(), folder->path());
  return 0;
}
