#ifndef OPTSTATE_STORAGE_DURABLE_COMMIT_H_
#define OPTSTATE_STORAGE_DURABLE_COMMIT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace optstate::storage {

// All of a job at one durable step, but the records themselves.
struct DurableCommit {
  uint64_t generation = 0;  // counts the commits of the job, from 1 on
  uint64_t step = 0;
  uint64_t incarnation = 0;  // of the job
  uint32_t slots = 2;
  uint32_t paths = 1;
  // Weights of the directories, see SplitRecords(); none: equal parts.
  std::vector<uint32_t> weights;
  // A byte by record: bit 0 is the slot, bit 1 says whether the slot has the
  // record (else the record is all zeros).
  std::vector<uint8_t> places;
  std::vector<uint32_t> checksums;  // those of the slots that are named
  std::string job;  // what the session keeps: description, counts, record
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_DURABLE_COMMIT_H_
