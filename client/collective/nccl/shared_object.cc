#include "client/collective/nccl/shared_object.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace optstate::client {

absl::StatusOr<SharedObject> SharedObject::Open(const std::string& path) {
  void* const handle =
      dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle != nullptr) return SharedObject(path, handle);
  const char* const text = dlerror();
  return absl::NotFoundError(absl::StrCat(
      "dlopen(", path, "): ", text == nullptr ? "unknown error" : text));
}

absl::Status SharedObject::FindAddress(const char* symbol,
                                       void** address) const {
  *address = dlsym(handle_, symbol);
  if (*address != nullptr) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(path_, " has no ", symbol,
                                               ": it is too old, or another "
                                               "library"));
}

}  // namespace optstate::client
