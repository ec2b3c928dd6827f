#include "client/ctl/lock_text.h"

#include "absl/strings/str_cat.h"
#include "client/ctl/output.h"

namespace optstate::ctl {

std::string LockText(const v1::MemoryLock& lock) {
  std::string text = HumanBytes(lock.locked_bytes());
  if (lock.pending_bytes() != 0) {
    absl::StrAppend(&text, ", ", HumanBytes(lock.pending_bytes()),
                    " being locked");
  }
  if (lock.unlocked_bytes() != 0) {
    absl::StrAppend(&text, "; ", HumanBytes(lock.unlocked_bytes()),
                    " not: ", lock.reason());
  }
  return text;
}

}  // namespace optstate::ctl
