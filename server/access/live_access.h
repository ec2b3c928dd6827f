#ifndef OPTSTATE_SERVER_ACCESS_LIVE_ACCESS_H_
#define OPTSTATE_SERVER_ACCESS_LIVE_ACCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/config.pb.h"
#include "proto/tls/tls_context.h"
#include "server/access/caller.h"
#include "server/access/identities.h"
#include "server/access/tokens.h"

namespace optstate::access {

// The content of the files that say who TLS clients are, at one time.
class AccessRules {
 public:
  AccessRules(std::shared_ptr<const tls::TlsContext> context,
              Identities identities, Tokens tokens, std::string trust,
              bool asks_for_certificates)
      : context_(std::move(context)),
        identities_(std::move(identities)),
        tokens_(std::move(tokens)),
        trust_(std::move(trust)),
        asks_for_certificates_(asks_for_certificates) {}

  const std::shared_ptr<const tls::TlsContext>& context() const {
    return context_;
  }
  // Finds who has a certificate with these names. Without tls.client_ca_file no
  // certificate is asked for, and the client is nobody until it shows a token.
  absl::StatusOr<Caller> FindByNames(
      const std::vector<std::string>& names) const;
  absl::StatusOr<Caller> FindByToken(absl::string_view token) const {
    return tokens_.Find(token);
  }
  // The content of the files that make clients believed: rules that differ in
  // it would not let in the same ones.
  const std::string& trust() const { return trust_; }
  bool asks_for_certificates() const { return asks_for_certificates_; }

 private:
  const std::shared_ptr<const tls::TlsContext> context_;
  const Identities identities_;
  const Tokens tokens_;
  const std::string trust_;
  const bool asks_for_certificates_;
};

// The files of `tls` and `access`, read anew when they change. Files that are
// wrong, or do not fit each other yet, are logged once for each change, and
// leave the former content in force.
//
// Threads: thread-safe.
class LiveAccess {
 public:
  // How often the files are looked at, at most.
  static constexpr absl::Duration kLookEvery = absl::Seconds(1);

  using Clock = std::function<absl::Time()>;

  // Errors name the file and what is wrong.
  static absl::StatusOr<std::unique_ptr<LiveAccess>> Load(
      const v1::DaemonConfig& config, Clock clock = absl::Now);

  // Returns what is in force, having looked whether files have changed.
  std::shared_ptr<const AccessRules> Current();

 private:
  // The facts that tell that a file has changed, also by way of a link.
  struct Stamp {
    dev_t device = 0;
    ino_t inode = 0;
    int64_t changed_ns = 0;
    off_t size = -1;  // -1: missing
    friend bool operator==(const Stamp&, const Stamp&) = default;
  };

  LiveAccess(const v1::DaemonConfig& config, Clock clock)
      : tls_(config.tls()),
        access_(config.access()),
        clock_(std::move(clock)) {}

  std::vector<Stamp> Stamps() const;
  absl::StatusOr<std::shared_ptr<const AccessRules>> Read() const;

  const v1::TlsSettings tls_;
  const v1::AccessSettings access_;
  const Clock clock_;
  absl::Mutex mutex_;
  absl::Time looked_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::vector<Stamp> stamps_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const AccessRules> rules_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_LIVE_ACCESS_H_
