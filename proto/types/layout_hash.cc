#include "proto/types/layout_hash.h"

#include <openssl/evp.h>

#include <memory>

#include "absl/strings/string_view.h"

namespace optstate {
namespace {

// SHA-256 over numbers and strings. A failure of libcrypto (no memory, no
// provider) sticks and shows in Finish().
class Hasher {
 public:
  Hasher()
      : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free),
        ok_(context_ != nullptr &&
            EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1) {}

  void Add(uint64_t number) {
    char bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(number >> (8 * i));
    Add(absl::string_view(bytes, sizeof(bytes)));
  }

  void Add(absl::string_view bytes) {
    ok_ = ok_ &&
          EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1;
  }

  absl::StatusOr<std::string> Finish() {
    std::string hash(32, '\0');
    unsigned int size = 0;
    ok_ = ok_ &&
          EVP_DigestFinal_ex(context_.get(),
                             reinterpret_cast<unsigned char*>(hash.data()),
                             &size) == 1 &&
          size == hash.size();
    if (!ok_) return absl::InternalError("SHA-256 of the layout failed");
    return hash;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
  bool ok_;
};

}  // namespace

absl::StatusOr<std::string> LayoutHash(const LayoutSpec& spec) {
  Hasher hasher;
  hasher.Add(absl::string_view("optstate.layout.3"));
  hasher.Add(static_cast<uint64_t>(spec.state_format));
  hasher.Add(static_cast<uint64_t>(spec.master_format));
  hasher.Add(static_cast<uint64_t>(spec.optimizer));
  hasher.Add(static_cast<uint64_t>(spec.groups.size()));
  for (const GroupSpec& group : spec.groups) {
    hasher.Add(uint64_t{group.options});
  }
  hasher.Add(static_cast<uint64_t>(spec.parameters.size()));
  for (const ParameterSpec& parameter : spec.parameters) {
    hasher.Add(static_cast<uint64_t>(parameter.name.size()));
    hasher.Add(absl::string_view(parameter.name));
    hasher.Add(static_cast<uint64_t>(parameter.shape.size()));
    for (int64_t dimension : parameter.shape) {
      hasher.Add(static_cast<uint64_t>(dimension));
    }
    hasher.Add(static_cast<uint64_t>(parameter.dtype));
    hasher.Add(static_cast<uint64_t>(parameter.gradient_dtype));
    hasher.Add(uint64_t{parameter.group});
  }
  for (const ParameterSpec& parameter : spec.parameters) {
    if (!parameter.shard.has_value()) break;  // none is a shard
    hasher.Add(uint64_t{parameter.shard->owner});
    for (int64_t dimension : parameter.shard->global_shape) {
      hasher.Add(static_cast<uint64_t>(dimension));
    }
    for (int64_t offset : parameter.shard->offset) {
      hasher.Add(static_cast<uint64_t>(offset));
    }
  }
  return hasher.Finish();
}

}  // namespace optstate
