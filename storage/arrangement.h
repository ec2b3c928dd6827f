#ifndef OPTSTATE_STORAGE_ARRANGEMENT_H_
#define OPTSTATE_STORAGE_ARRANGEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "storage/io/io_engine.h"

namespace optstate::storage {

// The part of a device that has the records of one directory.
struct DeviceExtent {
  std::string device;  // its path; empty: they are in the file `records`
  io::Extent extent;
};

// Where the records of a job lie on disk. A job that exists gets another
// arrangement by writing all its records anew, in other files
// (StateStore::BeginMove).
struct Arrangement {
  // Counts the arrangements of the job, from 0 on: it chooses the names of
  // files (FORMAT.md).
  uint32_t number = 0;
  std::vector<std::string> directories;
  // By directory, which of them has its records on a device; none: all have
  // files.
  std::vector<DeviceExtent> extents = {};
  // Weights of the directories, see record_split.h.
  std::vector<uint32_t> weights = {};
};

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_ARRANGEMENT_H_
