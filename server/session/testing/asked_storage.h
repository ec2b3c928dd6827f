#ifndef OPTSTATE_SERVER_SESSION_TESTING_ASKED_STORAGE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_ASKED_STORAGE_H_

#include <cstdint>

#include "optstate/v1/types.pb.h"

// The stores that the environment asks for: BUILD files start tests of jobs
// again over others.
namespace optstate::session {

// Returns the settings with the records of all jobs swapped when the test was
// started for that: nothing may lean on records that stay in memory.
v1::StorageSettings AskedStorage(v1::StorageSettings given);

// Says whether the test was started with records that are evicted: nothing may
// use a record without a pin.
bool EvictsRecords();

// Returns the seed of the next such store. Prints that of the first;
// OPTSTATE_TEST_STORE_SEED in the environment repeats a run.
uint64_t NextStoreSeed();

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_ASKED_STORAGE_H_
