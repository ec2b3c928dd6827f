#ifndef OPTSTATE_SERVER_ENGINE_MEMORY_USE_H_
#define OPTSTATE_SERVER_ENGINE_MEMORY_USE_H_

#include <istream>
#include <map>
#include <string>

#include "optstate/v1/admin.pb.h"

namespace optstate::engine {

// The location in memory of mapped files, as the kernel reports it for the
// pages that this process has touched.
struct MemoryUse {
  std::map<uint64_t, uint64_t> pages;  // bytes by page size
  std::map<uint32_t, uint64_t> nodes;  // bytes by NUMA node
};

// Returns memory use by "MAJOR:MINOR INODE" as /proc/PID/smaps writes them,
// without anonymous mappings. `smaps` and `numa_maps` are files of /proc/PID;
// `huge_page_bytes` is the size of the kernel's transparent huge pages.
std::map<std::string, MemoryUse> ParseMemoryUse(std::istream& smaps,
                                                std::istream& numa_maps,
                                                uint64_t huge_page_bytes);

// Fills in pages and nodes of `arrays` of the job in this directory, whose
// files are mapped by this process. Leaves out values that the kernel does not
// report.
void AddMemoryUse(const std::string& job_dir, v1::Job* job);

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_MEMORY_USE_H_
