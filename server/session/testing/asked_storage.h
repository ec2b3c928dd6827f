#ifndef OPTSTATE_SERVER_SESSION_TESTING_ASKED_STORAGE_H_
#define OPTSTATE_SERVER_SESSION_TESTING_ASKED_STORAGE_H_

#include <cstdint>
#include <string>

#include "optstate/v1/types.pb.h"
#include "proto/types/optimizer.h"

// The stores that the environment asks for: BUILD files start tests of jobs
// again over others.
namespace optstate::session {

// Returns the settings with the records of all jobs swapped when the test was
// started for that: nothing may lean on records that stay in memory.
v1::StorageSettings AskedStorage(v1::StorageSettings given);

// Returns the settings with a part of the elements updated by devices when the
// test was started for that, with an optimizer that they have, and with records
// that stay there, where they may; and the devices of the daemon.
v1::StorageSettings ShareWithDevices(v1::StorageSettings given,
                                     OptimizerKind optimizer);
std::string AskedDevices();

// Says whether the test was started with records that are evicted: nothing may
// use a record without a pin.
bool EvictsRecords();

// Returns the seed of the next such store. Prints that of the first;
// OPTSTATE_TEST_STORE_SEED in the environment repeats a run.
uint64_t NextStoreSeed();

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_ASKED_STORAGE_H_
