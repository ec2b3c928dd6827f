#ifndef OPTSTATE_STORAGE_TIERS_NVME_NVME_OPTIONS_H_
#define OPTSTATE_STORAGE_TIERS_NVME_NVME_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "storage/arrangement.h"
#include "storage/durable_commit.h"
#include "storage/io/io_engine.h"

namespace optstate::nvme {

// The options of a store: NvmeStore::Options.
struct NvmeOptions {
  std::unique_ptr<io::IoEngine> engine;
  // The job's own directories, at least one; they exist.
  std::vector<std::string> directories;
  // By directory, which of them has its records on a device, where the caller
  // has given the job that much (SwapSizes::records_by_directory); none: all
  // have files.
  std::vector<storage::DeviceExtent> extents = {};
  uint32_t arrangement = 0;  // see Arrangement
  // FramesBytes() of at least kFramesMin frames, and TableBytes(); both
  // outlive the store. A table of zeros: the job is new.
  absl::Span<std::byte> frames;
  absl::Span<std::byte> table;
  uint64_t incarnation = 0;
  // Weights of the directories, see record_split.h. For a job that exists they
  // are those that it was made with, or none; any other are refused
  // (FAILED_PRECONDITION).
  std::vector<uint32_t> weights = {};
  bool is_durable = false;  // commits can be requested
  // The room of a commit for DurableCommit::job.
  uint64_t job_bytes = 0;
  // With a table of zeros: the commit at which the job goes on.
  const storage::DurableCommit* restored = nullptr;
  // The job has no parameter area: records hold the parameters.
  bool holds_parameters = false;
  // The memory for sections of parameters, if records hold them: at least
  // kSwapCacheSectionsMin of the largest.
  uint64_t parameter_cache_bytes = 0;
};

// The options that decide about sizes: NvmeStore::SizeOptions.
struct NvmeSizeOptions {
  bool is_durable = false;
  uint32_t directories = 1;
  uint64_t job_bytes = 0;  // see NvmeOptions
  std::vector<uint32_t> weights = {};
  bool holds_parameters = false;  // see NvmeOptions
  // The job exists, and its frame table says FrameTable::HasSections().
  bool has_sections = false;
};

// Reads that fail are tried so often.
inline constexpr uint8_t kNvmeReadAttemptsMax = 3;

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_NVME_OPTIONS_H_
