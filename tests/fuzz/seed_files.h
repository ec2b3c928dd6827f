#ifndef OPTSTATE_TESTS_FUZZ_SEED_FILES_H_
#define OPTSTATE_TESTS_FUZZ_SEED_FILES_H_

#include <string>

namespace optstate::fuzz {

// Writes the target's seeds to this folder, a file each. Ends the process with
// the reason when it cannot.
void WriteSeeds(const std::string& folder);

}  // namespace optstate::fuzz

#endif  // OPTSTATE_TESTS_FUZZ_SEED_FILES_H_
