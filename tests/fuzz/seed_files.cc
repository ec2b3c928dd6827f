#include "tests/fuzz/seed_files.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {

void WriteSeeds(const std::string& folder) {
  const std::vector<std::string> seeds = Seeds();
  for (size_t i = 0; i < seeds.size(); ++i) {
    const std::string path = folder + "/seed_" + std::to_string(i);
    std::ofstream file(path, std::ios::binary);
    file << seeds[i];
    file.close();
    if (file) continue;
    std::fprintf(stderr, "%s cannot be written\n", path.c_str());
    std::exit(2);
  }
}

}  // namespace optstate::fuzz
