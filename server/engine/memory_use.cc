#include "server/engine/memory_use.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace optstate::engine {
namespace {

using Words = std::vector<absl::string_view>;

// Size of a transparent huge page where the kernel does not report it.
constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

// "Rss:  12 kB" in bytes.
uint64_t BytesOf(const Words& words) {
  uint64_t kilobytes = 0;
  if (words.size() < 2 || !absl::SimpleAtoi(words[1], &kilobytes)) return 0;
  return kilobytes * 1024;
}

// One mapping as smaps describes it.
struct Mapping {
  std::string begin;  // address, hexadecimal
  std::string file;   // device and inode
  uint64_t page = 0;
  uint64_t touched = 0;
  uint64_t huge = 0;     // part of `touched` in transparent huge pages
  uint64_t hugetlb = 0;  // not in `touched`
};

class SmapsReader {
 public:
  SmapsReader(std::map<std::string, MemoryUse>* uses, uint64_t huge_page_bytes)
      : uses_(uses), huge_page_bytes_(huge_page_bytes) {}

  // File by begin of mapping.
  const std::map<std::string, std::string>& files() const { return files_; }

  void Line(const std::string& line) {
    const Words words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.empty()) return;
    if (!absl::EndsWith(words[0], ":")) {
      End();
      // BEGIN-END PERMISSIONS OFFSET DEVICE INODE PATH
      if (words.size() < 5 || words[4] == "0") return;
      mapping_.begin = std::string(words[0].substr(0, words[0].find('-')));
      mapping_.file = absl::StrCat(words[3], " ", words[4]);
    } else if (words[0] == "KernelPageSize:") {
      mapping_.page = BytesOf(words);
    } else if (words[0] == "Rss:") {
      mapping_.touched = BytesOf(words);
    } else if (words[0] == "ShmemPmdMapped:" || words[0] == "FilePmdMapped:") {
      mapping_.huge += BytesOf(words);
    } else if (absl::EndsWith(words[0], "_Hugetlb:")) {
      mapping_.hugetlb += BytesOf(words);
    }
  }

  void End() {
    if (!mapping_.file.empty()) {
      MemoryUse& use = (*uses_)[mapping_.file];
      const uint64_t small = mapping_.touched - mapping_.huge;
      if (small != 0) use.pages[mapping_.page] += small;
      if (mapping_.huge != 0) use.pages[huge_page_bytes_] += mapping_.huge;
      if (mapping_.hugetlb != 0) use.pages[mapping_.page] += mapping_.hugetlb;
      files_[mapping_.begin] = mapping_.file;
    }
    mapping_ = Mapping();
  }

 private:
  std::map<std::string, MemoryUse>* const uses_;
  const uint64_t huge_page_bytes_;
  std::map<std::string, std::string> files_;
  Mapping mapping_;
};

// BEGIN POLICY file=PATH mapped=N N0=PAGES N1=PAGES kernelpagesize_kB=4
void AddNodes(const std::string& line,
              const std::map<std::string, std::string>& files,
              std::map<std::string, MemoryUse>* uses) {
  const Words words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  if (words.empty()) return;
  const auto file = files.find(std::string(words[0]));
  if (file == files.end()) return;
  std::vector<std::pair<uint32_t, uint64_t>> pages;
  uint64_t page_bytes = 0;
  for (const absl::string_view word : words) {
    const std::pair<absl::string_view, absl::string_view> field =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    uint32_t node = 0;
    uint64_t value = 0;
    if (!absl::SimpleAtoi(field.second, &value)) continue;
    if (field.first == "kernelpagesize_kB") {
      page_bytes = value * 1024;
    } else if (absl::StartsWith(field.first, "N") &&
               absl::SimpleAtoi(field.first.substr(1), &node)) {
      pages.emplace_back(node, value);
    }
  }
  for (const auto& [node, count] : pages) {
    (*uses)[file->second].nodes[node] += count * page_bytes;
  }
}

uint64_t HugePageBytes() {
  uint64_t bytes = 0;
  std::ifstream("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") >> bytes;
  return bytes == 0 ? kHugePageBytes : bytes;
}

}  // namespace

std::map<std::string, MemoryUse> ParseMemoryUse(std::istream& smaps,
                                                std::istream& numa_maps,
                                                uint64_t huge_page_bytes) {
  std::map<std::string, MemoryUse> uses;
  SmapsReader reader(&uses, huge_page_bytes);
  std::string line;
  while (std::getline(smaps, line)) reader.Line(line);
  reader.End();
  while (std::getline(numa_maps, line)) AddNodes(line, reader.files(), &uses);
  return uses;
}

void AddMemoryUse(const std::string& job_dir, v1::Job* job) {
  std::ifstream smaps("/proc/self/smaps");
  std::ifstream numa_maps("/proc/self/numa_maps");
  const std::map<std::string, MemoryUse> uses =
      ParseMemoryUse(smaps, numa_maps, HugePageBytes());
  for (v1::ArrayBytes& array : *job->mutable_arrays()) {
    struct stat info;
    const std::string path = absl::StrCat(job_dir, "/state/", array.file());
    if (::stat(path.c_str(), &info) != 0) continue;
    const auto use = uses.find(absl::StrFormat(
        "%02x:%02x %d", major(info.st_dev), minor(info.st_dev), info.st_ino));
    if (use == uses.end()) continue;
    for (const auto& [page_bytes, bytes] : use->second.pages) {
      v1::PageBytes* pages = array.add_pages();
      pages->set_page_bytes(page_bytes);
      pages->set_bytes(bytes);
    }
    for (const auto& [node, bytes] : use->second.nodes) {
      v1::NodeBytes* nodes = array.add_nodes();
      nodes->set_node(node);
      nodes->set_bytes(bytes);
    }
  }
}

}  // namespace optstate::engine
