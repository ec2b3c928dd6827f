#include "proto/tls/test_certificates.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"

namespace optstate::tls {
namespace {

constexpr char kIsCa[] = "critical,CA:TRUE";

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "test certificates: %s\n", what);
  ERR_print_errors_fp(stderr);
  std::abort();
}

EVP_PKEY* MakeKey() {
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  Check(key != nullptr, "no key");
  return key;
}

// A file that is there is replaced, as one that is renewed in use.
void WriteFile(const std::string& path, mode_t mode,
               bool (*write)(std::FILE*, const void*), const void* what) {
  const std::string next = path + ".next";
  std::FILE* const file = std::fopen(next.c_str(), "w");
  Check(file != nullptr, path.c_str());
  Check(write(file, what), path.c_str());
  std::fclose(file);
  ::chmod(next.c_str(), mode);
  Check(std::rename(next.c_str(), path.c_str()) == 0, path.c_str());
}

bool WriteCertificate(std::FILE* file, const void* certificate) {
  return PEM_write_X509(file, static_cast<const X509*>(certificate)) == 1;
}

bool WriteKey(std::FILE* file, const void* key) {
  return PEM_write_PrivateKey(file, static_cast<const EVP_PKEY*>(key), nullptr,
                              nullptr, 0, nullptr, nullptr) == 1;
}

void AddExtension(X509* certificate, int kind, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, certificate, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension =
      X509V3_EXT_conf_nid(nullptr, &context, kind, value);
  Check(extension != nullptr, value);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

}  // namespace

TestCa::TestCa(std::string directory, const std::string& name)
    : directory_(std::move(directory)),
      name_(name),
      file_(absl::StrCat(directory_, "/", name, ".crt")),
      key_(MakeKey()) {
  certificate_ = Sign(key_, name, "", absl::Now() - absl::Hours(48),
                      absl::Now() + absl::Hours(48));
  WriteFile(file_, 0644, WriteCertificate, certificate_);
}

TestCa::~TestCa() {
  X509_free(certificate_);
  EVP_PKEY_free(key_);
}

X509* TestCa::Sign(EVP_PKEY* subject_key, const std::string& subject,
                   const std::string& names, absl::Time not_before,
                   absl::Time not_after) const {
  X509* const made = X509_new();
  Check(made != nullptr, "no certificate");
  X509_set_version(made, 2);
  static long serial = 1;
  ASN1_INTEGER_set(X509_get_serialNumber(made), serial++);
  std::time_t begin = absl::ToTimeT(not_before);
  X509_time_adj_ex(X509_getm_notBefore(made), 0, 0, &begin);
  std::time_t end = absl::ToTimeT(not_after);
  X509_time_adj_ex(X509_getm_notAfter(made), 0, 0, &end);
  X509_set_pubkey(made, subject_key);
  X509_NAME_add_entry_by_txt(
      X509_get_subject_name(made), "CN", MBSTRING_UTF8,
      reinterpret_cast<const unsigned char*>(subject.c_str()), -1, -1, 0);
  X509_NAME* const issuer = X509_NAME_new();
  X509_NAME_add_entry_by_txt(
      issuer, "CN", MBSTRING_UTF8,
      reinterpret_cast<const unsigned char*>(name_.c_str()), -1, -1, 0);
  X509_set_issuer_name(made, issuer);
  X509_NAME_free(issuer);
  if (subject_key == key_) {
    AddExtension(made, NID_basic_constraints, kIsCa);
  } else {
    AddExtension(made, NID_ext_key_usage, "serverAuth,clientAuth");
  }
  if (!names.empty()) {
    AddExtension(made, NID_subject_alt_name, names.c_str());
  }
  Check(X509_sign(made, key_, EVP_sha256()) != 0, "not signed");
  return made;
}

TlsFiles TestCa::Issue(const std::string& name, const std::string& names,
                       absl::Time not_after, absl::Time not_before) const {
  EVP_PKEY* const key = MakeKey();
  X509* const certificate = Sign(key, name, names, not_before, not_after);
  const TlsFiles files = {
      .certificate = absl::StrCat(directory_, "/", name, ".crt"),
      .key = absl::StrCat(directory_, "/", name, ".key"),
      .ca = file_};
  WriteFile(files.certificate, 0644, WriteCertificate, certificate);
  WriteFile(files.key, 0600, WriteKey, key);
  X509_free(certificate);
  EVP_PKEY_free(key);
  return files;
}

}  // namespace optstate::tls
