// Linked with libFuzzer: with OPTSTATE_FUZZ_SEEDS=FOLDER in the environment the
// target writes its seeds there, as a corpus to begin from, and ends.

#include <google/protobuf/stubs/logging.h>
#include <spdlog/spdlog.h>

#include <cstdlib>

#include "tests/fuzz/seed_files.h"

extern "C" __attribute__((visibility("default"))) int LLVMFuzzerInitialize(
    int* /*argc*/, char*** /*argv*/) {
  spdlog::set_level(spdlog::level::off);
  google::protobuf::SetLogHandler(nullptr);
  const char* folder = std::getenv("OPTSTATE_FUZZ_SEEDS");
  if (folder == nullptr) return 0;
  optstate::fuzz::WriteSeeds(folder);
  std::exit(0);
}
