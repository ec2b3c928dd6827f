#ifndef OPTSTATE_TESTS_CONFORMANCE_STATE_STORE_SUITE_H_
#define OPTSTATE_TESTS_CONFORMANCE_STATE_STORE_SUITE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/layout.h"
#include "proto/types/random_layout.h"
#include "storage/state_store.h"
#include "storage/tiers/host_store.h"

namespace optstate {

// The arrays of a job, whole in memory.
class StateMemory {
 public:
  explicit StateMemory(const Layout& layout);
  storage::StateArrays arrays();

 private:
  std::vector<std::byte> parameters_, master_;
  std::vector<int64_t> step_counts_;
  std::vector<double> scalars_;
  std::array<std::vector<std::byte>, kStateArraysMax> state_;
  std::array<std::vector<float>, kStateArraysMax> scale_;
};

// A job with a new store, whose records are zeros.
class StateStoreWorld {
 public:
  struct Setup {
    const Layout* layout = nullptr;  // outlives the world
    uint64_t sub_group_elements = 0;
    uint64_t seed = 0;
  };
  virtual ~StateStoreWorld() = default;
  virtual storage::StateStore& store() = 0;
  // Ends the store and opens the next one of the job.
  virtual void Reopen() = 0;
};

struct StateStoreWorldParam {
  std::string name;
  std::unique_ptr<StateStoreWorld> (*make)(const StateStoreWorld::Setup& setup);
};
inline void PrintTo(const StateStoreWorldParam& param, std::ostream* out) {
  *out << param.name;
}
std::string StateStoreWorldName(
    const testing::TestParamInfo<StateStoreWorldParam>& info);

// The guarantees of a store, wherever its records are. A binary that links the
// suite instantiates it:
//
//   INSTANTIATE_TEST_SUITE_P(Stores, StateStoreSuite, testing::Values(...),
//                            StateStoreWorldName);
//
// Each test has a random job; the seed is printed first.
class StateStoreSuite : public testing::TestWithParam<StateStoreWorldParam> {
 protected:
  StateStoreSuite();

  storage::StateStore& store() { return world_->store(); }
  size_t records() const { return model_->sub_groups().size(); }
  // Writes random bytes to all that a store keeps of a record, and to the
  // model.
  void Write(const storage::StateStore::Pin& pin, std::mt19937_64* random);
  void WriteAll();
  void FillParameters(size_t record);
  // Says whether a record has the bytes of the model.
  bool IsAsModel(const storage::StateStore::Pin& pin);
  void CompareAll();
  void Reopen() { world_->Reopen(); }

  RandomLayouts layouts_;  // prints the seed
  const Layout layout_;
  std::mt19937_64 random_;
  StateMemory model_memory_;
  std::unique_ptr<storage::HostStore> model_;
  std::unique_ptr<StateStoreWorld> world_;
};

}  // namespace optstate

#endif  // OPTSTATE_TESTS_CONFORMANCE_STATE_STORE_SUITE_H_
