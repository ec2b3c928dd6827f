#include "server/session/testing/asked_storage.h"

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

namespace optstate::session {
namespace {

uint64_t FirstStoreSeed() {
  const char* given = ::getenv("OPTSTATE_TEST_STORE_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 0)
                                         : std::random_device{}();
  std::fprintf(stderr, "OPTSTATE_TEST_STORE_SEED=%" PRIu64 "\n", seed);
  return seed;
}

}  // namespace

v1::StorageSettings AskedStorage(v1::StorageSettings given) {
  const char* placement = ::getenv("OPTSTATE_TEST_PLACEMENT");
  if (placement != nullptr && std::string(placement) == "nvme" &&
      given.placement() == v1::PLACEMENT_UNSPECIFIED) {
    given.set_placement(v1::PLACEMENT_NVME);
    given.set_parameters_on_disk(::getenv("OPTSTATE_TEST_PARAMETERS") !=
                                 nullptr);
  }
  return given;
}

bool EvictsRecords() {
  const char* store = ::getenv("OPTSTATE_TEST_STORE");
  return store != nullptr && std::string(store) == "evicting";
}

uint64_t NextStoreSeed() {
  static std::atomic<uint64_t> next = FirstStoreSeed();
  return next++;
}

}  // namespace optstate::session
