#ifndef OPTSTATE_TESTS_FUZZ_FUZZ_TARGET_H_
#define OPTSTATE_TESTS_FUZZ_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

// A fuzz target is one file NAME_fuzz.cc with the two functions below. It is
// linked with libFuzzer (tests/fuzz/run), or with corpus_main.cc as a test that
// runs its corpus and a bounded number of mutations of it.

// Runs one input. Whatever the bytes are, it returns 0; a crash, a report of a
// sanitizer, a hang and memory without bound are bugs of the code under test.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace optstate::fuzz {

// Returns inputs made of real messages, from which mutations begin. They are
// built anew at each start, so that they follow the formats.
std::vector<std::string> Seeds();

// Ends the process, as a finding, when a promise of the code under test is
// broken.
inline void Require(bool condition, const char* promise) {
  if (condition) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

}  // namespace optstate::fuzz

#endif  // OPTSTATE_TESTS_FUZZ_FUZZ_TARGET_H_
