#ifndef OPTSTATE_CLIENT_COLLECTIVE_NCCL_SHARED_OBJECT_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NCCL_SHARED_OBJECT_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace optstate::client {

// A library that is opened when it is needed, so that programs start without
// it.
//
// Threads: thread-safe. The library stays loaded until the process ends, since
// NCCL and CUDA have threads and exit handlers of their own.
class SharedObject {
 public:
  // NOT_FOUND, with the loader's text: it cannot be opened. `path`: a file, or
  // a name that the loader looks for.
  static absl::StatusOr<SharedObject> Open(const std::string& path);

  // Sets a function pointer by the symbol's name. UNIMPLEMENTED: the library
  // lacks it.
  template <typename Function>
  absl::Status Find(const char* symbol, Function** function) const {
    void* address = nullptr;
    absl::Status status = FindAddress(symbol, &address);
    *function = reinterpret_cast<Function*>(address);
    return status;
  }

  const std::string& path() const { return path_; }

 private:
  SharedObject(std::string path, void* handle)
      : path_(std::move(path)), handle_(handle) {}
  absl::Status FindAddress(const char* symbol, void** address) const;

  std::string path_;
  void* handle_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NCCL_SHARED_OBJECT_H_
