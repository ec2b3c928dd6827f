#include "tests/fuzz/mutator.h"

#include <algorithm>
#include <cstring>

namespace optstate::fuzz {
namespace {

// Numbers at which checks tend to be wrong, in two's complement.
constexpr int64_t kNumbers[] = {
    0,         1,          -1,        2,         7,
    8,         16,         127,       128,       255,
    256,       4095,       4096,      32767,     32768,
    65535,     65536,      1 << 20,   INT32_MAX, int64_t{INT32_MAX} + 1,
    INT32_MIN, UINT32_MAX, INT64_MAX, INT64_MIN, INT64_MAX / 8 + 1};

}  // namespace

std::string Mutator::Mutate(const std::vector<std::string>& inputs) {
  std::string bytes = inputs[Draw(inputs.size())];
  const size_t changes = 1 + Draw(4);
  for (size_t i = 0; i < changes; ++i) Change(inputs, &bytes);
  if (bytes.size() > kBytesMax) bytes.resize(kBytesMax);
  return bytes;
}

void Mutator::Change(const std::vector<std::string>& inputs,
                     std::string* bytes) {
  if (bytes->empty()) return Insert(bytes);
  switch (Draw(7)) {
    case 0:
    case 1:
      return FlipBit(bytes);
    case 2:
      return PutNumber(bytes);
    case 3:
      return Insert(bytes);
    case 4:
      return Remove(bytes);
    case 5:
      return Repeat(bytes);
    default:
      return Join(inputs[Draw(inputs.size())], bytes);
  }
}

void Mutator::FlipBit(std::string* bytes) {
  char& byte = (*bytes)[Draw(bytes->size())];
  byte = static_cast<char>(byte ^ (1 << Draw(8)));
}

void Mutator::PutNumber(std::string* bytes) {
  const int64_t number = kNumbers[Draw(std::size(kNumbers))];
  const size_t width = std::min(size_t{1} << Draw(4), bytes->size());
  const size_t at = Draw(bytes->size() - width + 1);
  std::memcpy(bytes->data() + at, &number, width);
}

void Mutator::Insert(std::string* bytes) {
  const size_t at = Draw(bytes->size() + 1);
  std::string inserted(1 + Draw(8), '\0');
  for (char& byte : inserted) byte = static_cast<char>(Draw(256));
  bytes->insert(at, inserted);
}

void Mutator::Remove(std::string* bytes) {
  const size_t at = Draw(bytes->size());
  bytes->erase(at, 1 + Draw(std::min<size_t>(64, bytes->size() - at)));
}

void Mutator::Repeat(std::string* bytes) {
  const size_t at = Draw(bytes->size());
  const std::string part = bytes->substr(at, 1 + Draw(64));
  bytes->insert(Draw(bytes->size() + 1), part);
}

void Mutator::Join(const std::string& other, std::string* bytes) {
  if (other.empty()) return;
  bytes->resize(Draw(bytes->size() + 1));
  bytes->append(other, Draw(other.size()), std::string::npos);
}

}  // namespace optstate::fuzz
