#ifndef OPTSTATE_PROTO_TLS_TEST_CERTIFICATES_H_
#define OPTSTATE_PROTO_TLS_TEST_CERTIFICATES_H_

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/tls/tls_context.h"

namespace optstate::tls {

// A certificate authority of a test, and what it signs, as PEM files in a
// directory. A failure of OpenSSL ends the process.
class TestCa {
 public:
  // Writes DIRECTORY/NAME.crt.
  TestCa(std::string directory, const std::string& name);
  ~TestCa();
  TestCa(const TestCa&) = delete;
  TestCa& operator=(const TestCa&) = delete;

  // Writes DIRECTORY/NAME.crt and NAME.key. `names` as in OpenSSL's
  // subjectAltName: "DNS:node7,IP:127.0.0.1,URI:spiffe://a/b,email:a@b".
  // Returns the files, with this CA as the one of the other side.
  TlsFiles Issue(const std::string& name, const std::string& names,
                 absl::Time not_after = absl::Now() + absl::Hours(24),
                 absl::Time not_before = absl::Now() - absl::Hours(48)) const;

  const std::string& file() const { return file_; }

 private:
  X509* Sign(EVP_PKEY* subject_key, const std::string& subject,
             const std::string& names, absl::Time not_before,
             absl::Time not_after) const;

  const std::string directory_;
  const std::string name_;
  const std::string file_;
  EVP_PKEY* const key_;
  X509* certificate_ = nullptr;
};

}  // namespace optstate::tls

#endif  // OPTSTATE_PROTO_TLS_TEST_CERTIFICATES_H_
