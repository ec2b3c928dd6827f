#ifndef OPTSTATE_CLIENT_COLLECTIVE_STORE_FILE_STORE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_STORE_FILE_STORE_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/collective/store/store.h"

namespace optstate::client {

// A store in a folder that all ranks see: each key is a file. Files are made
// under another name and linked, so that a reader sees a whole value or none;
// this holds over NFS too. They can be read by their owner alone, and stay when
// the run is over: each run takes a fresh folder, or names of its own.
class FileStore final : public Store {
 public:
  // Opens a folder, which exists. NOT_FOUND, FAILED_PRECONDITION (it is no
  // folder, or users other than this one and root can write in it: they could
  // send ranks anywhere).
  static absl::StatusOr<std::unique_ptr<FileStore>> Open(std::string folder);

  absl::Status Set(absl::string_view key, absl::string_view value) override;
  // Looks every 1 to 50 ms.
  absl::StatusOr<std::string> Get(absl::string_view key,
                                  absl::Time deadline) override;

 private:
  explicit FileStore(std::string folder) : folder_(std::move(folder)) {}
  std::string PathOf(absl::string_view key) const;

  const std::string folder_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_STORE_FILE_STORE_H_
