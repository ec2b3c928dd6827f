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

uint64_t AskedDeviceBudget() {
  const char* budget = ::getenv("OPTSTATE_TEST_DEVICE_BUDGET");
  return budget == nullptr ? 0 : std::strtoull(budget, nullptr, 0);
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

std::string AskedDevices() {
  const char* devices = ::getenv("OPTSTATE_TEST_DEVICES");
  return devices == nullptr ? "none" : devices;
}

v1::StorageSettings ShareWithDevices(v1::StorageSettings given,
                                     OptimizerKind optimizer) {
  // Emulated devices take long for Muon's products.
  if (AskedDevices() != "none" && optimizer != OptimizerKind::kMuon &&
      !given.has_offload_fraction()) {
    given.set_offload_fraction(0.4);
    if (!given.parameters_on_disk()) {
      given.set_device_budget_bytes(AskedDeviceBudget());
    }
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
