// Linked with libFuzzer: with OPTSTATE_FUZZ_SEEDS=FOLDER in the environment the
// target writes its seeds there, as a corpus to begin from, and ends.

#include <spdlog/spdlog.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

void WriteSeeds(const std::string& folder) {
  const std::vector<std::string> seeds = Seeds();
  for (size_t i = 0; i < seeds.size(); ++i) {
    const std::string path = absl::StrCat(folder, "/seed_", i);
    std::ofstream file(path, std::ios::binary);
    file << seeds[i];
    file.close();
    if (file) continue;
    std::fprintf(stderr, "%s cannot be written\n", path.c_str());
    std::exit(2);
  }
}

}  // namespace
}  // namespace optstate::fuzz

extern "C" __attribute__((visibility("default"))) int LLVMFuzzerInitialize(
    int* /*argc*/, char*** /*argv*/) {
  spdlog::set_level(spdlog::level::off);
  const char* folder = std::getenv("OPTSTATE_FUZZ_SEEDS");
  if (folder == nullptr) return 0;
  optstate::fuzz::WriteSeeds(folder);
  std::exit(0);
}
