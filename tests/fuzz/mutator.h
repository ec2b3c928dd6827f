#ifndef OPTSTATE_TESTS_FUZZ_MUTATOR_H_
#define OPTSTATE_TESTS_FUZZ_MUTATOR_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace optstate::fuzz {

// Changes inputs at random, by a seed: flips bits, overwrites numbers with
// extreme ones, inserts, removes, repeats and joins. Two mutators with one seed
// return the same inputs.
//
// Threads: not thread-safe.
class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  // Returns an input made of one of `inputs`, which are not empty, by one to
  // four changes; at most kBytesMax long.
  std::string Mutate(const std::vector<std::string>& inputs);

  static constexpr size_t kBytesMax = 16384;

 private:
  // Returns a number in [0, limit), for a limit of at least 1.
  size_t Draw(size_t limit) { return random_() % limit; }
  void Change(const std::vector<std::string>& inputs, std::string* bytes);
  void FlipBit(std::string* bytes);
  void PutNumber(std::string* bytes);
  void Insert(std::string* bytes);
  void Remove(std::string* bytes);
  void Repeat(std::string* bytes);
  void Join(const std::string& other, std::string* bytes);

  std::mt19937_64 random_;
};

}  // namespace optstate::fuzz

#endif  // OPTSTATE_TESTS_FUZZ_MUTATOR_H_
