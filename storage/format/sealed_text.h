#ifndef OPTSTATE_STORAGE_FORMAT_SEALED_TEXT_H_
#define OPTSTATE_STORAGE_FORMAT_SEALED_TEXT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::storage {

// Small texts that people read too, with a checksum behind them, the seal.
//
// The seal is 32 characters of white space: the bits of the text's CRC-32C, the
// highest first, a blank for 0 and a line's end for 1. Builds that know no seal
// read words and pass over white space, so they read a sealed text as any
// other, and what they write, or a person, has no seal and is read as it is.
// A wrong byte does not make an unsealed text of a sealed one that reads the
// same: where it is among the last ones of the seal, it is a word more.

// Seals a text, which ends with a line's end and with no other white space.
std::string SealText(absl::string_view text);

// Says whether a text has a seal, and is what was sealed.
bool IsSealed(absl::string_view text);

// Returns the text without its seal, or as it is if it never had one. It is a
// part of `text`. DATA_LOSS: it has a seal, and one of both is damaged.
absl::StatusOr<absl::string_view> UnsealText(absl::string_view text);

}  // namespace optstate::storage

#endif  // OPTSTATE_STORAGE_FORMAT_SEALED_TEXT_H_
